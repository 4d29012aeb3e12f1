"""A step written down without a GPU and without computing: fake tensors, whose storages live as long as real ones.

The same step runs under torch's FakeTensorMode: dispatch, autograd, autocast, optimizers and sharding are the real
code, tensors have shapes and no memory.  The Recorder sees every operation's results; a storage that it meets for the
first time is an allocation, the end of that storage is a free.  On the CPU, where the allocator neither rounds nor
caches, the bytes alive between two operations are those of a real run, to the byte (tests compare them with what
torch's profiler counts).

What an operation allocates and frees inside itself is not seen.
"""

from __future__ import annotations

import functools
import importlib
import sys
import time
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from tonnage.errors import CannotEstimate
from tonnage.ghost.process import INSIDE
from tonnage.step import fake_ranks as peers
from tonnage.step import inputs
from tonnage.step.constants import KnownValues, tensors_in
from tonnage.step.world import World
from tonnage.trace.communicators import Communicators, Layout
from tonnage.trace.trace import ACTIONS, EVENT_COLUMNS, Activity, Claim, Mark, Trace, packed
from tonnage.trainers import engine_of, libraries

if TYPE_CHECKING:
    from tonnage.case import Case
    from tonnage.cluster import Cluster

NOT_SEEN: Final = "memory that an operation takes and gives back inside itself: not counted"
VALUES: Final = "values that were computed and then read: zero"


class Temporaries(Protocol):
    """What operations take besides their results, in bytes of each block."""

    def before(self, op: Any, args: Any) -> Sequence[int]:
        """What it takes before its results, and gives back after them: copies of its arguments."""

    def __call__(self, recorder: Recorder, op: Any, args: Any, kwargs: Any, result: Any) -> Sequence[int]:
        """What it takes and gives back once its results are there; what is taken for good the Recorder may hold."""


_DROPOUT: Final = torch.ops.aten.native_dropout.default
"""Its kernel makes the mask before the result (ATen/native/cuda/Dropout.cu)."""
_NORMS: Final = {torch.ops.aten.native_layer_norm.default: 2, torch.ops.aten.native_group_norm.default: 1}
"""Norms, and which of their arguments is the weight."""
_ALLOCATED: Final = ("segment_alloc", "alloc")
_FREED: Final = ("free_requested", "free_completed", "segment_free")
_CODES: Final = {name: code for code, name in enumerate(ACTIONS)}
_EXCHANGES: Final = ("c10d", "_c10d_functional", "_dtensor")
_COLLECTIVES: Final = {
    **dict.fromkeys(("allreduce_", "all_reduce", "all_reduce_"), "AllReduce"),
    **dict.fromkeys(("allgather_", "_allgather_base_", "all_gather_into_tensor"), "AllGather"),
    **dict.fromkeys(("_reduce_scatter_base_", "reduce_scatter_tensor"), "ReduceScatter"),
    "broadcast_": "Broadcast",
    "send": "Send",
    "recv_": "Recv",
    **dict.fromkeys(("shard_dim_alltoall", "all_to_all_single"), "AllToAll"),
}
"""Operations by which ranks exchange, as NCCL calls what they do."""
_PAIRS: Final = ("Send", "Recv")
_PAIRED: Final = torch.__version__ < (2, 15)
"""Whether NCCL makes a communicator for the two of each pair; since 2.15 that of all is there already."""
_OURS: Final = str(Path(__file__).parent)
"""Frames of this room are not part of the program's own stack."""
_LINE_BYTES: Final = 64
"""Made-up addresses are multiples of it, as those of torch's CPU allocator."""


class Memory(Protocol):
    """Where a Recorder's device keeps what is recorded, and the account of it."""

    capacity_bytes: int
    """What the device has."""

    @property
    def peak_allocated_bytes(self) -> int:
        """The most that was handed out at once."""

    @property
    def peak_reserved_bytes(self) -> int:
        """The most that was held from the system at once."""

    @property
    def retries(self) -> int:
        """How often memory was given back to the system to serve a request."""

    def allocate(self, size_bytes: int, mark: int) -> int:
        """The address of a new block of at least one byte.  Raises DoesNotFit."""

    def free(self, address: int, size_bytes: int, mark: int) -> None:
        """Give a block back."""

    def connect(self, used: Communicators) -> None:
        """Take what NCCL takes for these.  Raises DoesNotFit."""

    def columns(self) -> dict[str, array[int]]:
        """All events so far, as a Trace has them."""


class DoesNotFit(Exception):
    """A request that a device could not serve; the message is that of torch's own error."""


class HostMemory:
    """The system's memory: each block is a segment of its own, neither rounded nor kept for later."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.live_bytes = self.peak_allocated_bytes = 0
        self.retries = 0
        self._columns: dict[str, array[int]] = {name: array("q") for name in EVENT_COLUMNS}
        self._next_address = _LINE_BYTES

    @property
    def peak_reserved_bytes(self) -> int:
        """What is handed out is all that is held."""
        return self.peak_allocated_bytes

    def allocate(self, size_bytes: int, mark: int) -> int:
        """Memory right behind the last.  Raises DoesNotFit."""
        if self.live_bytes + size_bytes > self.capacity_bytes:
            self._note("oom", 0, size_bytes, mark)
            raise DoesNotFit(
                f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {size_bytes} bytes; "
                f"{self.live_bytes} of {self.capacity_bytes} are in use."
            )
        address = self._next_address
        self._next_address += -(-size_bytes // _LINE_BYTES) * _LINE_BYTES
        for action in _ALLOCATED:
            self._note(action, address, size_bytes, mark)
        self.live_bytes += size_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.live_bytes)
        return address

    def free(self, address: int, size_bytes: int, mark: int) -> None:
        """The system has it again at once."""
        for action in _FREED:
            self._note(action, address, size_bytes, mark)
        self.live_bytes -= size_bytes

    def connect(self, used: Communicators) -> None:
        """Ranks on the host exchange without NCCL."""

    def columns(self) -> dict[str, array[int]]:
        """A copy of the events."""
        return {name: column[:] for name, column in self._columns.items()}

    def _note(self, action: str, address: int, size_bytes: int, mark: int) -> None:
        for name, value in zip(EVENT_COLUMNS, (_CODES[action], address, size_bytes, 0, mark), strict=True):
            self._columns[name].append(value)


def _grouped_mm(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> torch.Tensor:
    """The result of a grouped matrix product: torch's fake one takes bf16 alone, its CPU kernel any dtype.

    (rows, k) x (groups, k, n) -> (rows, n); (m, rows) x (rows, n) -> (groups, m, n); each row of the result begins
    at a multiple of 16 bytes.  torch/_meta_registrations.py, _create_grouped_mm_output_tensor.
    """
    dtype = out_dtype or a.dtype
    groups = () if a.dim() != b.dim() else (offs.shape[0] if a.dim() == 2 else a.shape[0],)
    rows, columns = a.shape[-2], b.shape[-1]
    padded = -(-columns * dtype.itemsize // 16) * 16 // dtype.itemsize
    strides = (padded, 1) if not groups else (rows * padded, padded, 1)
    return a.new_empty_strided((*groups, rows, columns), strides, dtype=dtype)


def _normed(op: Any, *args: Any, **options: Any) -> Any:
    """A norm on the host, which keeps means and deviations of 16-bit inputs in fp32 where its weight is
    (ATen/native/cpu/mixed_data_type.h); torch's rule says in the input's dtype."""
    result, *kept = op(*args, **options)
    weight = args[_NORMS[op]]
    if weight is not None and weight.dtype == torch.float32:
        kept = [each.float() for each in kept]
    return result, *kept


def _waited_for(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _fake_like(known: Any, device: torch.device) -> Any:
    """Fake tensors of the same shapes on a device."""
    return tree_map_only(torch.Tensor, functools.partial(torch.empty_like, device=device), known)


@dataclass
class _Block:
    """A storage that is alive."""

    address: int
    size_bytes: int
    storage: weakref.ref[torch.UntypedStorage]
    """Held because its callback tells of the end."""
    maker: weakref.ref[torch.Tensor]
    """The tensor with which it was first seen; others are views."""


@dataclass(frozen=True)
class _Sum:
    """A sum of gradients of which it is not known yet whether it was made in place."""

    result: weakref.ref[torch.Tensor]
    first: int
    """Key of the storage of what was there already."""


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Hears of every storage on one device: when it is made, resized and given back; `memory` keeps account."""

    def __init__(self, device: torch.device, memory: Memory, temporaries: Temporaries | None = None) -> None:
        super().__init__()
        self.device = device
        self.memory = memory
        self.temporaries = temporaries
        self.read_values = False
        self.adds_in_place = False
        """Whether what runs would add real tensors in place, and does not with fake ones."""
        self.mark: Callable[[], int] = lambda: 0
        """The number of the mark that events belong to."""
        self.on_shortage: Callable[[int], None] = lambda requested_bytes: None
        """Told of a request that does not fit, before OutOfMemoryError is raised."""
        self.collectives: list[Activity] = []
        """What ranks exchanged, of which this one's part is on the device."""
        self._groups: dict[tuple[str, str], int] = {}
        self._communicators = Communicators()
        self._together = False
        """Whether sends and receives are asked for at once, which is one exchange of the whole group."""
        self._pauses = 0
        self._blocks: dict[int, _Block] = {}
        self._results: list[tuple[weakref.ref[torch.Tensor], str]] = []
        self._sum: _Sum | None = None
        self._divided: Any = None
        """The operation on divided tensors of which operations on parts come next."""
        self._values = KnownValues()

    def address(self, tensor: torch.Tensor) -> int:
        """Where the tensor's storage begins; 0 where it has no memory on the device."""
        self._place_sum()
        block = self._blocks.get(_key(tensor.untyped_storage()))
        return block.address if block is not None else 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at the storages of its results."""
        kwargs = kwargs or {}
        if self._pauses:
            return op(*args, **kwargs)
        if DTensor in types:  # which makes it operations on parts, and exchanges between them
            self._divided = op
            return NotImplemented
        if (
            op.namespace == "prim"
        ):  # questions of autograd about devices and layouts, in the middle of other operations
            return op(*args, **kwargs)
        self.settle()
        try:
            result = self._formula(op)(*args, **kwargs)
        except DataDependentOutputException:
            known = self._values.compute(op, args, kwargs)
            return self._read(op, args) if known is None else known
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
            for tensor in _plain(result if op is not _DROPOUT else result[::-1]):
                self.see(tensor)
        if op.namespace in _EXCHANGES:
            self._note_exchange(op, args, result)
        if self.temporaries is not None:
            self._give_back(copies)
            self._give_back(self._take(self.temporaries(self, op, args, kwargs, result)))
        if torch.is_grad_enabled():
            self._results += [(weakref.ref(leaf), name) for leaf in tensors_in(result) for name in _numbers(op, args)]
        return result

    def _note_exchange(self, op: Any, args: Any, result: Any) -> None:
        """Note which memory a collective sends from and writes to."""
        name = _COLLECTIVES.get(op.overloadpacket.__name__)
        whole = op.namespace == "c10d"  # which names what it writes to first
        given = args if whole else result if name == "AllReduce" else (args, result)  # of a copy, in its place
        tensors = [tensor for tensor in tensors_in(given) if tensor.device == self.device]
        if name is None or not tensors:
            return
        group = peers.group_of(args)
        peer = args[2] if name in _PAIRS else 0
        size, place, key = group.size(), group.rank(), (group.group_name, "")
        if name in _PAIRS and not self._together and _PAIRED:
            size, key, place = 2, (key[0], str(peer)), int(place > peer)
        layout = (size, self._groups.setdefault(key, len(self._groups)), place)
        size_bytes = min(tensor.numel() * tensor.element_size() for tensor in tensors)
        first, last = self.address(tensors[-1]), self.address(tensors[0])
        apart = name == "AllToAll" and op.overloadpacket.__name__ == "all_to_all_single" and args[1]
        calls = [(each, other) for other in range(size) for each in _PAIRS] if apart else [(name, peer)]
        for called, other in calls:  # parts of different sizes are sent and received one by one
            self.collectives.append(
                Activity("collective", called, self.mark(), 0, layout, other, 0, size_bytes, first, last)
            )
            self._connect(layout, called, other)

    def _connect(self, layout: Layout, name: str, peer: int) -> None:
        """Make room for what NCCL takes at this exchange.  Raises torch.OutOfMemoryError."""
        if not any(self._communicators.use(layout, name, peer)):
            return
        try:
            self.memory.connect(self._communicators)
        except DoesNotFit as error:
            raise torch.OutOfMemoryError(str(error)) from None

    def _accumulates(self, op: Any, args: Any) -> bool:
        """Whether this may be autograd adding a gradient to what is there already, which it does in place if it can.

        It can where nobody else has the first gradient and that is no view; under a dispatch mode it never does.
        The sum then takes the memory of the first if that ends before anything else happens; else it gets its own.
        torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace.
        """
        if op is not torch.ops.aten.add.Tensor or type(args[0]) is not FakeTensor:
            return False
        if self._divided is op:  # a sum of divided gradients is never made in place
            self._divided = None
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
            self._meet(tensor, storage)
        elif block.size_bytes != storage.nbytes():
            self.resized(storage)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A known storage has another size now: new memory, and the old is given back."""
        block = self._blocks.get(_key(storage))
        if block is not None and block.size_bytes != storage.nbytes():
            before = (block.address, block.size_bytes)
            block.size_bytes = storage.nbytes()
            block.address = self._allocate(block.size_bytes)
            self._free(*before)

    def _meet(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self._remember(self._allocate(size), size, tensor, storage)

    def _remember(self, address: int, size: int, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        gone = functools.partial(self._gone, _key(storage))
        self._blocks[_key(storage)] = _Block(address, size, weakref.ref(storage, gone), weakref.ref(tensor))

    def _gone(self, key: int, _reference: object) -> None:
        block = self._blocks.pop(key)
        if self._sum is not None and key == self._sum.first and self._summed_in_place(block):
            return
        self._place_sum()
        self._free(block.address, block.size_bytes)

    def _summed_in_place(self, part: _Block) -> bool:
        """Whether the sum that was computed last took the memory of this part, whose end is told."""
        assert self._sum is not None
        result = self._sum.result()
        storage = result.untyped_storage() if result is not None else None
        if storage is None or storage.nbytes() != part.size_bytes or _key(storage) in self._blocks:
            return False
        self._sum = None
        self._remember(part.address, part.size_bytes, result, storage)
        return True

    def _place_sum(self) -> None:
        """Give the sum that was computed last memory of its own."""
        pending, self._sum = self._sum, None
        result = pending.result() if pending is not None else None
        if result is not None:
            self.see(result)

    def _take(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """Blocks of these sizes: address and size of each."""
        return [(self._allocate(size), size) for size in sizes if size]

    def _give_back(self, blocks: list[tuple[int, int]]) -> None:
        """Free these blocks, the last one first."""
        for address, size in reversed(blocks):
            self._free(address, size)

    @contextmanager
    def adding_in_place(self) -> Iterator[None]:
        """Within it a sum takes the memory of its first part, if that ends with it."""
        self.adds_in_place = True
        try:
            yield
        finally:
            self.adds_in_place = False

    @contextmanager
    def exchanging_together(self) -> Iterator[None]:
        """Within it sends and receives are one exchange."""
        self._together = True
        try:
            yield
        finally:
            self._together = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within it nothing is heard: tensors that are made are not the program's."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def hold(self, size_bytes: int) -> None:
        """Take a block that is never given back."""
        self._allocate(size_bytes)

    def _allocate(self, size: int) -> int:
        """The address of a new block; 0 for none.  Raises torch.OutOfMemoryError."""
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

    def _formula(self, op: Any) -> Any:
        """The operation, or what stands in where torch's rule for fake tensors differs from its kernel."""
        if op is torch.ops._c10d_functional.wait_tensor.default:  # a new tensor for fake ones, the same for real ones
            return _waited_for
        if op in _NORMS and self.device.type == "cpu":
            return functools.partial(_normed, op)
        return _grouped_mm if op is torch.ops.aten._grouped_mm.default else op

    def _read(self, op: Any, args: Any) -> Any:
        """A value that was never computed is asked for: zero of its type, as on a ghost."""
        if op is not torch.ops.aten._local_scalar_dense.default:
            raise CannotEstimate(f"The step's course depends on computed values ({op}), which do not exist here.")
        self.read_values = True
        return _zero(args[0].dtype)

    def settle(self) -> None:
        """Note what could not be seen when the last operation ended.

        Autograd keeps some of the numbers that operations are given as tensors of one element: `x * 0.5`.

        The dispatcher shows them as plain numbers, so they are looked for in the nodes of the results, which are
        there as soon as the next operation begins.
        """
        self._place_sum()
        results, self._results = self._results, []
        for reference, name in results:
            tensor = reference()
            saved = getattr(tensor.grad_fn, f"_saved_{name}", None) if tensor is not None else None
            if isinstance(saved, torch.Tensor) and saved.device == self.device:
                self.see(saved)


def _key(storage: torch.UntypedStorage) -> int:
    """What tells storages apart while they live."""
    return int(storage._cdata)


def _zero(dtype: torch.dtype) -> bool | int | float | complex:
    if dtype == torch.bool:
        return False
    if dtype.is_complex:
        return 0j
    return 0.0 if dtype.is_floating_point else 0


def _plain(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that hold the memory of a result: of a DTensor, its shard."""
    for tensor in tensors_in(value):
        yield from inside("tensors").plain_tensors(tensor)


@functools.cache
def _tensor_arguments(op: Any) -> tuple[tuple[int, str], ...]:
    """Place and name of the arguments that an operation takes as tensors."""
    arguments = enumerate(op._schema.arguments) if hasattr(op, "_schema") else ()
    return tuple((place, item.name) for place, item in arguments if str(item.type) == "Tensor")


def _numbers(op: Any, args: Any) -> list[str]:
    """The names of the tensor arguments for which this call gave a number."""
    return [
        name for place, name in _tensor_arguments(op) if place < len(args) and isinstance(args[place], int | float)
    ]


@functools.cache
def inside(name: str) -> Any:
    """A module of those that run beside torch in a ghosted process too, where they are alone on the path."""
    if str(INSIDE) not in sys.path:
        sys.path.append(str(INSIDE))
    return importlib.import_module(f"tonnage_inside.{name}")


@contextmanager
def recording(device: torch.device, capacity_bytes: int) -> Iterator[tuple[Recorder, Any]]:
    """Within it nothing is computed, and everything on the host is recorded; gives the Recorder and its Watch."""
    recorder = Recorder(device, HostMemory(capacity_bytes))
    with watching(recorder, FakeTensorMode(allow_non_fake_inputs=True)) as watch:
        yield recorder, watch


@contextmanager
def watching(recorder: Recorder, fake: FakeTensorMode) -> Iterator[Any]:
    """Within it tensors are fake and the Recorder hears of them; gives a Watch."""
    peers.known_to_fake_tensors()
    watch = inside("watch").Watch(torch, address=recorder.address)
    recorder.mark = lambda: len(watch.marks) - 1
    recorder.on_shortage = lambda requested: watch.out_of_memory(0, requested, recorder.memory.capacity_bytes, 0)
    patches = (
        _outside_the_dispatcher(recorder),
        _converted_as_real(),
        peers.ddp(),
        peers.pairs(recorder.exchanging_together),
        _unheard_propagation(recorder),
        _unnoticed(),
        watch.hooked(),
    )
    with fake, recorder, ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield watch


@contextmanager
def _outside_the_dispatcher(recorder: Recorder) -> Iterator[None]:
    """Two ways to get memory that no operation shows: resizing a storage, and the state of the random numbers."""
    resize, get_rng_state = torch.UntypedStorage.resize_, torch.get_rng_state

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        recorder.resized(storage)
        return result

    def rng_state() -> torch.Tensor:
        state = get_rng_state()
        recorder.see(state)
        return state

    torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
    torch.get_rng_state = rng_state
    try:
        yield
    finally:
        torch.UntypedStorage.resize_, torch.get_rng_state = resize, get_rng_state  # type: ignore[method-assign]


@contextmanager
def _unheard_propagation(recorder: Recorder) -> Iterator[None]:
    """DTensor finds out shapes of results by fake tensors of its own, of which the program has none."""
    name = "_propagate_tensor_meta_non_cached"
    propagate = getattr(ShardingPropagator, name, None)
    if propagate is None:
        yield
        return

    @functools.wraps(propagate)
    def unheard(*arguments: Any, **options: Any) -> Any:
        with recorder.paused():
            return propagate(*arguments, **options)

    setattr(ShardingPropagator, name, unheard)
    try:
        yield
    finally:
        setattr(ShardingPropagator, name, propagate)


@contextmanager
def _converted_as_real() -> Iterator[None]:
    """`Module.to` and `to_empty` change fake parameters as they change real ones.

    torch would swap fake ones with their successors, which it refuses for tensors that have weak references.
    """
    original = torch.nn.Module._apply

    def apply(module: torch.nn.Module, change: Callable[[Any], Any], recurse: bool = True) -> torch.nn.Module:
        for child in module.children() if recurse else ():
            child._apply(change)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = _changed(parameter, change)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = change(buffer)
        return module

    torch.nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module._apply = original  # type: ignore[method-assign]


def _changed(parameter: torch.nn.Parameter, change: Callable[[Any], Any]) -> torch.nn.Parameter:
    """The parameter after a change of dtype or device: itself with new memory, or a new one on another device."""
    with torch.no_grad():
        value = change(parameter)
    if is_traceable_wrapper_subclass(value):  # a shard: torch swaps real ones too
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(value, parameter.requires_grad))
    elif value.device == parameter.device:
        parameter.data = value
        if parameter.grad is not None:
            parameter.grad.data = change(parameter.grad)
    else:
        return torch.nn.Parameter(value, parameter.requires_grad)
    return parameter


@contextmanager
def _unnoticed() -> Iterator[None]:
    """transformers takes other ways with fake tensors than with real ones; here it must not see the difference."""
    from transformers.utils import import_utils

    original = getattr(import_utils, "is_fake_tensor", None)
    if original is None:  # before it existed, transformers did not look
        yield
        return
    import_utils.is_fake_tensor = lambda value: False
    try:
        yield
    finally:
        import_utils.is_fake_tensor = original


def run(case: Case, *, rank: int = 0, steps: int = 3) -> Trace:
    """The Trace of one rank's steps on the CPU.  Raises CannotEstimate where the step needs computed values."""
    with recording(torch.device("cpu"), case.cluster.device.capacity_bytes) as (recorder, watch):
        return steps_of(case, recorder, watch, rank=rank, steps=steps, assumed=(NOT_SEEN,))


def steps_of(
    case: Case,
    recorder: Recorder,
    watch: Any,
    *,
    rank: int,
    steps: int,
    assumed: tuple[str, ...],
    allocator_settings: str = "",
) -> Trace:
    """Run the job's steps where a Recorder is listening.  Raises CannotEstimate where they need computed values."""
    plan, cluster = case.plan, case.cluster
    began = time.perf_counter()
    ended: dict[str, Any] = {"kind": "completed"}
    world = World(size=cluster.gpus, rank=rank, gpus_per_node=cluster.gpus_per_node, device=recorder.device)
    with _own_group():
        try:
            kept = engine_of(plan).run(case.job, plan, world, steps)
        except (DynamicOutputShapeException, UnsupportedOperatorException) as error:
            raise CannotEstimate(
                f"The step depends on computed values, which do not exist here ({error})."
            ) from error
        except Exception as error:
            if not inside("outcome").ran_out(error):
                raise
            ended = inside("outcome").of_exception(error, watch)
            ended["stack"] = [frame for frame in ended["stack"] if not frame.startswith(_OURS)]
            kept = error
        watch.finish()
        versions = inside("written").versions(torch, libraries(case.job, plan))
        found = _trace(recorder, watch, cluster, versions, rank=rank, outcome=ended, assumed=assumed)
        del kept  # what was built lives until its trace is written
    return replace(found, allocator_settings=allocator_settings, seconds=time.perf_counter() - began)


@contextmanager
def _own_group() -> Iterator[None]:
    """A process group that is made within does not outlive it."""
    before = dist.is_initialized()
    try:
        yield
    finally:
        if dist.is_initialized() and not before:
            dist.destroy_process_group()


def _trace(
    recorder: Recorder,
    watch: Any,
    cluster: Cluster,
    versions: dict[str, str],
    *,
    rank: int,
    outcome: dict[str, Any],
    assumed: tuple[str, ...],
) -> Trace:
    memory, device = recorder.memory, cluster.device
    return Trace(
        source="meta",
        versions=versions,
        device={
            "type": recorder.device.type,
            "name": device.name,
            "total_bytes": memory.capacity_bytes,
            "capability": f"{device.capability[0]}.{device.capability[1]}",
            "context_bytes": device.context_bytes,
            "devices": 1,
        },
        rank=rank,
        world_size=cluster.gpus,
        steps=watch.steps,
        outcome=outcome,
        peaks={
            "allocated_bytes": memory.peak_allocated_bytes,
            "reserved_bytes": memory.peak_reserved_bytes,
            "retries": memory.retries,
            "ooms": len(watch.ooms),
        },
        model=watch.model,
        assumed=(*assumed, *inputs.assumed(), *((VALUES,) if recorder.read_values else ())),
        marks=tuple(Mark(step=done, phase=phase, module=module) for done, phase, module in watch.marks),
        claims=tuple(Claim(mark=mark, address=address, category=kind) for mark, address, kind in watch.claims),
        event_columns=memory.columns(),
        **_exchanged(recorder),
    )


def _exchanged(recorder: Recorder) -> dict[str, Any]:
    """What ranks exchanged on a card, as a Trace has it; on the host, where nothing but tensors takes memory, not."""
    if recorder.device.type != "cuda":
        return {}
    names = tuple(sorted({each.name for each in recorder.collectives}))
    places = {name: place for place, name in enumerate(names)}
    return {"names": names, "log": b"".join(packed(each, places) for each in recorder.collectives)}
