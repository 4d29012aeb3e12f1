"""The Recorder: sees every storage of a device under fake tensors, as an allocation and a free."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tonnage.errors import CannotEstimate
from tonnage.meta.exchanges import NAMESPACES, Exchanges
from tonnage.meta.formulas import formula_of
from tonnage.meta.host_memory import DoesNotFit, Memory
from tonnage.meta.inside import inside
from tonnage.step.constants import KnownValues, tensors_in


class Temporaries(Protocol):
    """Bytes of each block that operations take besides their results."""

    def before(self, op: Any, args: Any) -> Sequence[int]:
        """Return the blocks taken before an operation's results and freed after them: copies of its arguments."""

    def __call__(self, recorder: Recorder, op: Any, args: Any, kwargs: Any, result: Any) -> Sequence[int]:
        """Return the blocks taken and freed once an operation's results exist; blocks that stay are taken by
        `recorder.hold`.
        """


_DROPOUT: Final = torch.ops.aten.native_dropout.default
"""Its kernel allocates the mask before the result (ATen/native/cuda/Dropout.cu)."""


def _fake_like(known: Any, device: torch.device) -> Any:
    """Return fake tensors of the same shapes on a device."""
    return tree_map_only(torch.Tensor, functools.partial(torch.empty_like, device=device), known)


@dataclass
class _Block:
    """A live storage."""

    address: int
    size_bytes: int
    storage: weakref.ref[torch.UntypedStorage]
    """Kept because its callback reports the storage's end."""
    maker: weakref.ref[torch.Tensor]
    """The tensor with which it was first seen; others are views."""


@dataclass(frozen=True)
class _Sum:
    """A sum of gradients of which it is not known yet if it was made in place."""

    result: weakref.ref[torch.Tensor]
    first: int
    """Key of the storage of the first summand."""


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Listens to every storage of one device: its creation, resizing and end; `memory` allocates and frees the
    blocks.
    """

    def __init__(self, device: torch.device, memory: Memory, temporaries: Temporaries | None = None) -> None:
        super().__init__()
        self.device = device
        self.memory = memory
        self.temporaries = temporaries
        self.read_values = False
        self.adds_in_place = False
        """True while code runs that adds real tensors in place, but not fake ones."""
        self.mark: Callable[[], int] = lambda: 0
        """Returns the number of the mark that events belong to."""
        self.on_shortage: Callable[[int], None] = lambda requested_bytes: None
        """Called with a request that does not fit, before OutOfMemoryError is raised."""
        self.exchanges = Exchanges(self)
        self._pauses = 0
        self._blocks: dict[int, _Block] = {}
        self._results: list[tuple[weakref.ref[torch.Tensor], str]] = []
        self._sum: _Sum | None = None
        self._dtensor_op: Any = None
        """The operation on DTensors whose operations on shards come next."""
        self._values = KnownValues()

    def address(self, tensor: torch.Tensor) -> int:
        """Return the address of the tensor's storage; 0 without memory on the device."""
        self._settle_sum()
        block = self._blocks.get(_key(tensor.untyped_storage()))
        return block.address if block is not None else 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at the storages of its results."""
        kwargs = kwargs or {}
        if self._pauses:
            return op(*args, **kwargs)
        if DTensor in types:  # it becomes operations on shards, and exchanges between them
            self._dtensor_op = op
            return NotImplemented
        if op.namespace == "prim":
            # autograd asks for devices and layouts in the middle of other operations
            return op(*args, **kwargs)
        self.settle()
        try:
            result = formula_of(op, self.device)(*args, **kwargs)
        except DataDependentOutputException:
            known = self._values.compute(op, args, kwargs)
            return self._read_value(op, args) if known is None else known
        except DynamicOutputShapeException:
            known = self._values.compute(op, args, kwargs)
            if known is None:
                raise
            result = _fake_like(known, tensors_in((args, kwargs))[0].device)
            self._values.keep(result, known)
        else:
            self._values.follow(op, args, kwargs, result)
        copies = self._take(self.temporaries.before(op, args)) if self.temporaries is not None else []
        if self._accumulates(op, args):
            self._sum = _Sum(weakref.ref(result), _key(args[0].untyped_storage()))
        else:
            for tensor in _plain_tensors(result if op is not _DROPOUT else result[::-1]):
                self.see(tensor)
        if op.namespace in NAMESPACES:
            self.exchanges.note(op, args, result)
        if self.temporaries is not None:
            self._free_blocks(copies)
            self._free_blocks(self._take(self.temporaries(self, op, args, kwargs, result)))
        if torch.is_grad_enabled():
            self._results += [
                (weakref.ref(leaf), name) for leaf in tensors_in(result) for name in _number_arguments(op, args)
            ]
        return result

    def _accumulates(self, op: Any, args: Any) -> bool:
        """Return True if this may be autograd adding a gradient to an existing one, which it does in place if it can.

        It can if nothing else refers to the first gradient and that is no view; under a dispatch mode it never does.
        The sum then takes the memory of the first if that ends before anything else happens; else it gets its own.
        torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace.
        """
        if op is not torch.ops.aten.add.Tensor or type(args[0]) is not FakeTensor:
            return False
        if self._dtensor_op is op:  # a sum of DTensors is never made in place
            self._dtensor_op = None
            return False
        if self.adds_in_place:
            return _key(args[0].untyped_storage()) in self._blocks
        if torch.is_grad_enabled() or torch._C._current_graph_task_id() == -1:
            return False
        block = self._blocks.get(_key(args[0].untyped_storage()))
        maker = block.maker() if block is not None else None
        kept_by_graph = block is not None and maker is None and not args[0]._is_view()  # seen first in forward
        return maker is args[0] or kept_by_graph

    def see(self, tensor: torch.Tensor) -> None:
        """Note the tensor's storage if it is new, or if it has another size than before."""
        if tensor.device != self.device:
            return
        storage = tensor.untyped_storage()
        block = self._blocks.get(_key(storage))
        if block is None:
            self._add(tensor, storage)
        elif block.size_bytes != storage.nbytes():
            self.resized(storage)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Note that a known storage has another size: new memory is allocated, the old is freed."""
        block = self._blocks.get(_key(storage))
        if block is not None and block.size_bytes != storage.nbytes():
            before = (block.address, block.size_bytes)
            block.size_bytes = storage.nbytes()
            block.address = self._allocate(block.size_bytes)
            self._free(*before)

    def _add(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self._remember(self._allocate(size), size, tensor, storage)

    def _remember(self, address: int, size: int, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        gone = functools.partial(self._on_end, _key(storage))
        self._blocks[_key(storage)] = _Block(address, size, weakref.ref(storage, gone), weakref.ref(tensor))

    def _on_end(self, key: int, _reference: object) -> None:
        block = self._blocks.pop(key)
        if self._sum is not None and key == self._sum.first and self._reuse_for_sum(block):
            return
        self._settle_sum()
        self._free(block.address, block.size_bytes)

    def _reuse_for_sum(self, part: _Block) -> bool:
        """Give the sum that was computed last the memory of this part, which ends; return True if it fits."""
        assert self._sum is not None
        result = self._sum.result()
        storage = result.untyped_storage() if result is not None else None
        if storage is None or storage.nbytes() != part.size_bytes or _key(storage) in self._blocks:
            return False
        self._sum = None
        self._remember(part.address, part.size_bytes, result, storage)
        return True

    def _settle_sum(self) -> None:
        """Give the sum that was computed last memory of its own."""
        pending, self._sum = self._sum, None
        result = pending.result() if pending is not None else None
        if result is not None:
            self.see(result)

    def _take(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """Allocate blocks of these sizes; return address and size of each."""
        return [(self._allocate(size), size) for size in sizes if size]

    def _free_blocks(self, blocks: list[tuple[int, int]]) -> None:
        """Free these blocks, the last one first."""
        for address, size in reversed(blocks):
            self._free(address, size)

    @contextmanager
    def adding_in_place(self) -> Iterator[None]:
        """Let a sum take the memory of its first part, if that ends with it."""
        self.adds_in_place = True
        try:
            yield
        finally:
            self.adds_in_place = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore tensors that are made inside: they are not the program's."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def hold(self, size_bytes: int) -> None:
        """Allocate a block that is never freed."""
        self._allocate(size_bytes)

    def _allocate(self, size: int) -> int:
        """Return the address of a new block; 0 for no bytes.  Raises torch.OutOfMemoryError."""
        if size == 0:
            return 0
        try:
            return self.memory.allocate(size, self.mark())
        except DoesNotFit as error:
            self.on_shortage(size)
            raise torch.OutOfMemoryError(str(error)) from None

    def _free(self, address: int, size: int) -> None:
        if address:
            self.memory.free(address, size, self.mark())

    def _read_value(self, op: Any, args: Any) -> Any:
        """Return zero for a value that was never computed and is asked for, as on a ghost."""
        if op is not torch.ops.aten._local_scalar_dense.default:
            raise CannotEstimate(f"The step depends on computed values ({op}), which do not exist here.")
        self.read_values = True
        return _zero(args[0].dtype)

    def settle(self) -> None:
        """Note storages that could not be seen when the last operation ended.

        Autograd saves some of the numbers that operations are given as tensors of one element: `x * 0.5`.

        The dispatcher shows them as plain numbers, so they are looked for in the nodes of the results, which exist as
        soon as the next operation begins.
        """
        self._settle_sum()
        results, self._results = self._results, []
        for reference, name in results:
            tensor = reference()
            saved = getattr(tensor.grad_fn, f"_saved_{name}", None) if tensor is not None else None
            if isinstance(saved, torch.Tensor) and saved.device == self.device:
                self.see(saved)


def _key(storage: torch.UntypedStorage) -> int:
    """Return what identifies a storage while it lives."""
    return int(storage._cdata)


def _zero(dtype: torch.dtype) -> bool | int | float | complex:
    if dtype == torch.bool:
        return False
    if dtype.is_complex:
        return 0j
    return 0.0 if dtype.is_floating_point else 0


def _plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that hold the memory of a result: of a DTensor, its shard."""
    for tensor in tensors_in(value):
        yield from inside("tensors").plain_tensors(tensor)


@functools.cache
def _tensor_arguments(op: Any) -> tuple[tuple[int, str], ...]:
    """Return index and name of the arguments that an operation takes as tensors."""
    arguments = enumerate(op._schema.arguments) if hasattr(op, "_schema") else ()
    return tuple((place, item.name) for place, item in arguments if str(item.type) == "Tensor")


def _number_arguments(op: Any, args: Any) -> list[str]:
    """Return the names of the tensor arguments for which this call gave a number."""
    return [
        name for place, name in _tensor_arguments(op) if place < len(args) and isinstance(args[place], int | float)
    ]
