"""A layer's forward, recorded operation by operation as the list of pieces from which `frontier` chooses what to
keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import SAC_IGNORED_OPS

from tonnage.techniques.budgeting.frontier import Piece

BLOCK_BYTES: Final = 512
"""Block sizes of the caching allocator are multiples of this (kMinBlockSize in CUDACachingAllocator)."""


_UNFILLED: Final = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


_PROBABILITIES: Final = ("dropout_p", "p")
"""Arguments that are zero if an operation that may draw random numbers draws none."""


Price = Callable[[Any, Any, Any, Any], tuple[float, float]]
"""Returns seconds and floating-point operations of an operation, from it, its arguments and its result."""


@dataclass(frozen=True)
class Layer:
    """The operations that one kind of layer runs."""

    operations: tuple[Any, ...]
    """Operations of forward in order, without those that only look at a tensor."""
    makers: tuple[int | None, ...]
    """Piece that each operation makes or changes; None for views and for operations that make nothing."""
    pieces: tuple[Piece, ...]
    """All memory that the layer makes."""
    flops: tuple[float, ...]
    """Floating-point operations of each piece."""


@dataclass
class _RunningPiece:
    """A piece while the layer runs."""

    bytes: int
    seconds: float
    flops: float
    reads: set[int]
    saved: bool = False
    fixed: bool = False
    unfilled: bool = False


_NOT_OURS: Final = -1
"""Piece number of memory that existed before the layer ran."""


class Recording:
    """Records one run of a layer."""

    def __init__(self, given: Iterable[torch.Tensor], device: torch.device, price: Price) -> None:
        self.device, self.price = device, price
        self.made: list[_RunningPiece] = []
        self.operations: list[Any] = []
        self.makers: list[int | None] = []
        self.wanted: set[int] = set()
        self.hidden = False
        """True if wrapper subclasses were seen, which hide their inner tensors."""
        self.owners: dict[int, int] = {}
        """The piece of each storage."""
        self.references: dict[int, Any] = {}
        """They keep a storage's number from being reused for another one."""
        self.alive: set[int] = set()
        """Storages that existed when autograd saved a tensor for the last time."""
        self._own(given, _NOT_OURS)

    def mode(self) -> AbstractContextManager[Any]:
        """Return the context in which the layer must run."""
        return _RecordingMode(self)

    def save(self, tensor: torch.Tensor) -> None:
        """Note that autograd saves this tensor."""
        for index in self._pieces_of([tensor]):
            self.made[index].saved = True
        self.alive = {key for key, reference in self.references.items() if not reference.expired()}

    def layer(self) -> Layer:
        """Return the recorded layer.

        Memory that no operation was seen to fill, but that another one reads, was filled by a kernel that no
        operation names; what that kernel read is not known either, so nothing may be spared then.
        """
        read = {index for piece in self.made for index in piece.reads}
        unknown = any(piece.unfilled and (piece.saved or index in read) for index, piece in enumerate(self.made))
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
        """Record one operation."""
        read = self._pieces_of(_tensors((args, kwargs)))
        changed = self._pieces_of(_written_tensors(operation, args, kwargs))
        seconds, flops = self.price(operation, args, kwargs, output)
        results = _tensors(output)
        new = [
            tensor for tensor in self._inner_tensors(results) if tensor.untyped_storage()._cdata not in self.owners
        ]
        maker = next(iter(changed), None)
        if new:
            maker = len(self.made)
            made = _RunningPiece(self._own(new, maker), seconds, flops, read)
            made.fixed = (
                _draws_random_numbers(operation, args, kwargs)
                or _is_collective(operation)
                or self._is_on_other_device(new)
            )
            made.unfilled = _name(operation) in _UNFILLED
            self.made.append(made)
        for index in changed:
            made = self.made[index]
            made.fixed, made.unfilled = True, False
            made.reads |= read - {index}
            made.seconds += seconds
            made.flops += flops
        if not results or (_is_mutable(operation) and not changed):
            self.wanted |= read  # it is looked at, or goes into memory that is not the layer's
        self.operations.append(operation)
        self.makers.append(maker)

    def _pieces_of(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        keys = (tensor.untyped_storage()._cdata for tensor in self._inner_tensors(tensors))
        return {self.owners[key] for key in keys if self.owners.get(key, _NOT_OURS) != _NOT_OURS}

    def _own(self, tensors: Iterable[torch.Tensor], index: int) -> int:
        """Note which piece the storages of tensors belong to; return their bytes on the device."""
        total = 0
        for tensor in self._inner_tensors(tensors):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.owners:
                self.owners[storage._cdata] = index
                self.references[storage._cdata] = StorageWeakRef(storage)
                total += 0 if self._is_on_other_device([tensor]) else blocks(storage.nbytes())
        return total

    def _is_on_other_device(self, tensors: Iterable[torch.Tensor]) -> bool:
        return any(tensor.device.type != self.device.type for tensor in tensors)

    def _inner_tensors(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the tensors with storages of their own, inside wrapper subclasses."""
        for tensor in tensors:
            self.hidden |= is_traceable_wrapper_subclass(tensor)
            yield from plain(tensor)


class _RecordingMode(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = operation(*args, **(kwargs or {}))
        if operation not in SAC_IGNORED_OPS:
            self.recording.see(operation, args, kwargs or {}, output)
        return output


def plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors with storages of their own that a tensor wraps: mostly itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [part for tensor in inner if isinstance(tensor, torch.Tensor) for part in plain(tensor)]


def blocks(size_bytes: int) -> int:
    """Return the size rounded up to whole blocks."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _name(operation: Any) -> str:
    return str(getattr(operation, "overloadpacket", operation)).rpartition(".")[2]


def _is_mutable(operation: Any) -> bool:
    schema = getattr(operation, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _arguments(operation: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the schema's arguments with their values."""
    schema = getattr(operation, "_schema", None)
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        given = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
        yield argument, given


def _written_tensors(operation: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors that an operation writes to."""
    if not _is_mutable(operation):
        return []
    written = (
        value
        for argument, value in _arguments(operation, args, kwargs)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return _tensors(list(written))


def _draws_random_numbers(operation: Any, args: Any, kwargs: Any) -> bool:
    """Return True if an operation draws random numbers: it may draw some, and the probability that it is given is
    not zero.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(operation, "tags", ()):
        return False
    probabilities = [
        value for argument, value in _arguments(operation, args, kwargs) if argument.name in _PROBABILITIES
    ]
    return not probabilities or any(probabilities)


def _is_collective(operation: Any) -> bool:
    """Return True if other ranks take part."""
    return "c10d" in str(getattr(operation, "namespace", ""))
