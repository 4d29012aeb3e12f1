"""A layer's forward, operation by operation: written down once, then run again in part.

`Writing` sees what a layer runs and what autograd saves of it; what comes out is the list of pieces of which
`frontier` chooses what to keep.  `contexts` are the two halves of torch's selective checkpointing for such a choice:
in forward, results of the pieces to be kept are held; in backward they are handed out again, and of the rest only
what is needed runs (torch's own contexts run all of it).  An operation that is spared gives memory without values,
which nothing reads.

A layer that does not run what was written down runs again in full but for what was kept, as under torch's contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import SAC_IGNORED_OPS

from tonnage.errors import CannotEstimate
from tonnage.techniques.budgeting.frontier import Piece, run_again
from tonnage.techniques.budgeting.hostward import Host, Luggage, Sent, detached

BLOCK_BYTES: Final = 512
"""The caching allocator hands out multiples of it (kMinBlockSize in CUDACachingAllocator)."""

_UNFILLED: Final = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_CHANCES: Final = ("dropout_p", "p")
"""Arguments without which an operation that may draw random numbers draws none."""

Price = Callable[[Any, Any, Any, Any], tuple[float, float]]
"""Seconds and floating-point operations of an operation, from it, its arguments and its result."""


@dataclass(frozen=True)
class Layer:
    """What one kind of layer runs."""

    operations: tuple[Any, ...]
    """Forward, in order, without those that only look at a tensor."""
    makers: tuple[int | None, ...]
    """For each operation the piece that it makes or changes; None for views and for what makes nothing."""
    pieces: tuple[Piece, ...]
    """All memory that the layer makes."""
    flops: tuple[float, ...]
    """Of each piece."""


class Does(Enum):
    """What happens with an operation when the layer runs again."""

    RUNS = 0
    KEPT = 1
    SPARED = 2
    SENT = 3
    """Kept on the host."""


# ---- written down -----------------------------------------------------------------------------------------------


@dataclass
class _Made:
    """A piece while the layer runs."""

    bytes: int
    seconds: float
    flops: float
    reads: set[int]
    saved: bool = False
    fixed: bool = False
    unfilled: bool = False


_GIVEN: Final = -1
"""Stands for memory that was there before the layer ran."""


class Writing:
    """One run of a layer, watched."""

    def __init__(self, given: Iterable[torch.Tensor], device: torch.device, price: Price) -> None:
        self.device, self.price = device, price
        self.made: list[_Made] = []
        self.operations: list[Any] = []
        self.makers: list[int | None] = []
        self.wanted: set[int] = set()
        self.hidden = False
        """Whether tensors were seen that hide what they are made of."""
        self.owners: dict[int, int] = {}
        """The piece of each memory."""
        self.references: dict[int, Any] = {}
        """They keep a memory's number from being given to another one."""
        self.alive: set[int] = set()
        """Memory that was there when autograd kept a tensor for the last time."""
        self._own(given, _GIVEN)

    def mode(self) -> AbstractContextManager[Any]:
        """In which the layer is to run."""
        return _Seeing(self)

    def save(self, tensor: torch.Tensor) -> None:
        """Autograd keeps this tensor."""
        for index in self._pieces_of([tensor]):
            self.made[index].saved = True
        self.alive = {key for key, reference in self.references.items() if not reference.expired()}

    def layer(self) -> Layer:
        """What was seen.

        Memory that nobody was seen to fill, but that somebody reads, was filled by a kernel that no operation names;
        what that read is not known either, so that nothing is spared.
        """
        read = {index for made in self.made for index in made.reads}
        unknown = any(made.unfilled and (made.saved or index in read) for index, made in enumerate(self.made))
        wanted = range(len(self.made)) if unknown or self.hidden else self.wanted
        alive = {self.owners[key] for key in self.alive}
        pieces = tuple(
            Piece(
                made.bytes,
                made.seconds,
                tuple(sorted(made.reads)),
                saved=made.saved,
                wanted=index in wanted,
                fixed=made.fixed,
                lingers=index in alive,
            )
            for index, made in enumerate(self.made)
        )
        return Layer(tuple(self.operations), tuple(self.makers), pieces, tuple(made.flops for made in self.made))

    def see(self, operation: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Note one operation."""
        read = self._pieces_of(_tensors((args, kwargs)))
        changed = self._pieces_of(_changed(operation, args, kwargs))
        seconds, flops = self.price(operation, args, kwargs, output)
        results = _tensors(output)
        new = [tensor for tensor in self._plain(results) if tensor.untyped_storage()._cdata not in self.owners]
        maker = next(iter(changed), None)
        if new:
            maker = len(self.made)
            made = _Made(self._own(new, maker), seconds, flops, read)
            made.fixed = _draws(operation, args, kwargs) or _exchanges(operation) or self._elsewhere(new)
            made.unfilled = _name(operation) in _UNFILLED
            self.made.append(made)
        for index in changed:
            made = self.made[index]
            made.fixed, made.unfilled = True, False
            made.reads |= read - {index}
            made.seconds += seconds
            made.flops += flops
        if not results or (_is_mutable(operation) and not changed):
            self.wanted |= read  # somebody looks at it, or it goes into memory that is not the layer's
        self.operations.append(operation)
        self.makers.append(maker)

    def _pieces_of(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        keys = (tensor.untyped_storage()._cdata for tensor in self._plain(tensors))
        return {self.owners[key] for key in keys if self.owners.get(key, _GIVEN) != _GIVEN}

    def _own(self, tensors: Iterable[torch.Tensor], index: int) -> int:
        """Note whose the memory of tensors is; its bytes on the device."""
        total = 0
        for tensor in self._plain(tensors):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.owners:
                self.owners[storage._cdata] = index
                self.references[storage._cdata] = StorageWeakRef(storage)
                total += 0 if self._elsewhere([tensor]) else blocks(storage.nbytes())
        return total

    def _elsewhere(self, tensors: Iterable[torch.Tensor]) -> bool:
        return any(tensor.device.type != self.device.type for tensor in tensors)

    def _plain(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Tensors that have memory of their own, in place of those that are made of others."""
        for tensor in tensors:
            self.hidden |= is_traceable_wrapper_subclass(tensor)
            yield from plain(tensor)


class _Seeing(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, writing: Writing) -> None:
        super().__init__()
        self.writing = writing

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = operation(*args, **(kwargs or {}))
        if operation not in SAC_IGNORED_OPS:
            self.writing.see(operation, args, kwargs or {}, output)
        return output


def plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Those with memory of their own that a tensor is made of: mostly itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [part for one in inner if isinstance(one, torch.Tensor) for part in plain(one)]


def blocks(size_bytes: int) -> int:
    """Rounded up to whole blocks."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _name(operation: Any) -> str:
    return str(getattr(operation, "overloadpacket", operation)).rpartition(".")[2]


def _is_mutable(operation: Any) -> bool:
    schema = getattr(operation, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _arguments(operation: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """The schema's arguments with their values."""
    schema = getattr(operation, "_schema", None)
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        given = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
        yield argument, given


def _changed(operation: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Tensors that an operation writes to."""
    if not _is_mutable(operation):
        return []
    written = (
        value
        for argument, value in _arguments(operation, args, kwargs)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return _tensors(list(written))


def _draws(operation: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws random numbers: one that may, unless the chance that it is given is zero."""
    if torch.Tag.nondeterministic_seeded not in getattr(operation, "tags", ()):
        return False
    chances = [value for argument, value in _arguments(operation, args, kwargs) if argument.name in _CHANCES]
    return not chances or any(chances)


def _exchanges(operation: Any) -> bool:
    """Whether other ranks take part."""
    return "c10d" in str(getattr(operation, "namespace", ""))


# ---- run again --------------------------------------------------------------------------------------------------


def decisions(layer: Layer, kept: frozenset[int], sent: frozenset[int] = frozenset()) -> tuple[Does, ...]:
    """What happens with each operation if these pieces are kept, some of them on the host."""
    again = run_again(layer.pieces, kept)

    def does(maker: int | None) -> Does:
        if maker is None or maker in again:
            return Does.RUNS
        if maker in sent:
            return Does.SENT
        return Does.KEPT if maker in kept else Does.SPARED

    return tuple(does(maker) for maker in layer.makers)


def contexts(
    layer: Layer, does: tuple[Does, ...], host: Host | None = None, on_astray: Callable[[], None] = lambda: None
) -> tuple[_Keeping, _Repeating]:
    """Around a forward, and around its repetition: the `context_fn` of torch's checkpoint.

    `host`: where results are sent, if some are.  `on_astray` is called after a forward that did not do what was
    written down.
    """
    tape = _Tape(None if host is None or Does.SENT not in does else host.luggage())
    return _Keeping(layer, does, tape, on_astray), _Repeating(tape)


@dataclass(frozen=True)
class _Shape:
    """What memory without values is made from."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> _Shape:
        return _Shape(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def made(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class _Kept:
    """A result, and how often it had been written to."""

    tensor: torch.Tensor
    version: int

    @staticmethod
    def of(tensor: torch.Tensor) -> _Kept:
        return _Kept(detached(tensor), tensor._version)

    def made(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise CannotEstimate("A result that was kept for backward was written to; choose checkpointing full.")
        return self.tensor


@dataclass(frozen=True)
class _Entry:
    """One operation of a forward."""

    operation: Any
    does: Does
    what: Any
    """Its result: kept, or as shapes; None where it runs again."""


class _Tape:
    """What one forward ran, and what it kept."""

    def __init__(self, luggage: Luggage | None) -> None:
        self.luggage = luggage
        """What is sent to the host."""
        self.entries: list[_Entry | None] = []
        self.astray = False
        """Whether the layer did something else than was written down, so that nothing may be spared."""


class _Keeping(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, layer: Layer, does: tuple[Does, ...], tape: _Tape, on_astray: Callable[[], None]) -> None:
        super().__init__()
        self.layer, self.does, self.tape, self.on_astray = layer, does, tape, on_astray

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = operation(*args, **(kwargs or {}))
        if operation not in SAC_IGNORED_OPS:
            self._note(operation, output)
        return output

    def _note(self, operation: Any, output: Any) -> None:
        place = len(self.tape.entries)
        known = self.layer.operations
        self.tape.astray |= place >= len(known) or known[place] is not operation
        does, what = Does.RUNS if self.tape.astray else self.does[place], None
        if does is not Does.RUNS:
            what = tree_map_only(torch.Tensor, self._make(does), output)
        self.tape.entries.append(_Entry(operation, does, what))

    def _make(self, does: Does) -> Callable[[torch.Tensor], Any]:
        if does is Does.SENT:
            assert self.tape.luggage is not None
            return self.tape.luggage.send
        return _Kept.of if does is Does.KEPT else _Shape.of

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.tape.astray |= len(self.tape.entries) < len(self.layer.operations)
        if self.tape.astray:
            self.on_astray()
        earlier = self.tape.luggage.previous() if self.tape.luggage is not None else None
        if earlier is not None:
            earlier.let_go()


class _Repeating(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, tape: _Tape) -> None:
        super().__init__()
        self.tape, self.place = tape, 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation in SAC_IGNORED_OPS:
            return operation(*args, **(kwargs or {}))
        entry = self._next(operation)
        if entry.does is Does.RUNS or (entry.does is Does.SPARED and self.tape.astray):
            return operation(*args, **(kwargs or {}))
        return tree_map_only((_Kept, _Shape, Sent), self._made, entry.what)

    def __enter__(self) -> Any:
        luggage = self.tape.luggage
        if luggage is not None:
            with torch.no_grad():
                luggage.bring()
                earlier = luggage.previous()
                if earlier is not None:
                    earlier.bring()
        return super().__enter__()

    def _made(self, held: Any) -> torch.Tensor:
        if isinstance(held, Sent):
            assert self.tape.luggage is not None
            return self.tape.luggage.take(held)
        made: torch.Tensor = held.made()
        return made

    def _next(self, operation: Any) -> _Entry:
        """What forward noted of the operation that comes now; the tape lets go of it."""
        entries, place = self.tape.entries, self.place
        self.place += 1
        entry = entries[place] if place < len(entries) else None
        if entry is None or entry.operation is not operation:
            raise CannotEstimate(
                "A layer does not run the same operations in backward as in forward, or runs twice; choose "
                "checkpointing full."
            )
        entries[place] = None
        return entry
