"""Activation offload: what the layers save for backward waits in pinned host memory.

`cpu`: torch's own `save_on_cpu(pin_memory=True)`.  Every saved tensor is copied when it is saved and copied back when
it is needed, on the compute stream, weights included.  `cpu-streamed`: copies run on a stream of their own, beside
the computation; weights and tensors below SMALL_BYTES stay; each storage is copied once however many tensors are
views of it.  `nvme`: the same, into files (see `disk`).  All act inside the module that holds the layers, so that
head and loss keep what they need on the GPU, and outside of checkpointing, whose layers then offload their inputs
alone.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Final

from tonnage.techniques import disk
from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from tonnage.case import Case
    from tonnage.step.step import Step

SMALL_BYTES: Final = 1 << 20
"""Tensors below this size are not worth a copy."""

LEAVING: Final = 2
"""Copies to the host that may be in flight at once; the GPU keeps their tensors until they are done."""

AHEAD: Final = 2
"""Copies back to the GPU that start before they are needed."""


def accepts(case: Case) -> Refusal | None:
    """Refuse torch's own offload where a layer saves DTensors: it makes plain tensors, into which they cannot be
    copied.  Tensor parallelism has them everywhere, the ring of context parallelism in attention.
    """
    plan = case.plan
    if plan.activation_offload != "cpu":
        return None
    keeps_attention = plan.checkpointing == "none" or plan.checkpointing.startswith("every-")
    if plan.tp > 1 or (plan.cp > 1 and keeps_attention):
        divided, more = ("tp", "") if plan.tp > 1 else ("cp", ", or checkpointing full")
        return Refusal(
            technique="activation_offload=cpu",
            reason=f"torch's save_on_cpu does not support tensors that are divided among the ranks of {divided}",
            instead=f"choose activation-offload cpu-streamed, which leaves those on the GPU, or nvme{more}",
        )
    return None


def apply(step: Step) -> Step:
    """Offload inside every module that holds layers."""
    if step.plan.checkpointing.startswith("budget") and step.plan.activation_offload == "cpu-streamed":
        return step  # the budget chooses what to offload, and offloads it
    device = step.world.device
    chosen: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "cpu": partial(_torch_hooks, device),
        "cpu-streamed": partial(_StreamedOffload, device, _allocate_in_memory),
        "nvme": partial(_StreamedOffload, device, _allocate_in_file),
    }
    new = chosen[step.plan.activation_offload]
    return replace(step, changes=(*step.changes, partial(_offload_layers, new=new)))


def _allocate_in_memory(count_bytes: int, device: torch.device) -> Tensor:
    import torch

    return torch.empty(count_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _allocate_in_file(count_bytes: int, device: torch.device) -> Tensor:
    import torch

    return disk.empty((count_bytes,), torch.uint8)


def _offload_layers(module: nn.Module, new: Callable[[], AbstractContextManager[Any]]) -> nn.Module:
    from tonnage.techniques.checkpointing import layer_lists_of

    layer_lists_of(module)  # there must be some
    for holder in _modules_with_layers(module):
        holder.forward = _run_inside(holder.forward, new)  # type: ignore[method-assign]
    return module


def _modules_with_layers(module: nn.Module) -> list[nn.Module]:
    """Return the modules whose children are lists of layers: a decoder, or an encoder and a decoder."""
    from tonnage.step.model import is_layer_list

    lists = [child for child in module.children() if is_layer_list(child)]
    rest = [child for child in module.children() if child not in lists]
    return [*([module] if lists else []), *(holder for child in rest for holder in _modules_with_layers(child))]


def _run_inside(forward: Callable[..., Any], new: Callable[[], AbstractContextManager[Any]]) -> Callable[..., Any]:
    @wraps(forward)
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        with new():
            return forward(*args, **kwargs)

    return offloaded


def _torch_hooks(device: torch.device) -> AbstractContextManager[Any]:
    from torch.autograd.graph import save_on_cpu

    hooks: AbstractContextManager[Any] = save_on_cpu(pin_memory=device.type == "cuda")
    return hooks


@dataclass(eq=False)
class _OffloadedStorage:
    """One storage that was saved, away from the GPU."""

    number: int
    """Its place in the order of saving."""
    host: Tensor
    """Its copy on the host, as bytes."""
    card: Tensor | None
    """The storage itself, until its copy to the host is done and again after the copy back."""
    done: Any
    """The event of the latest copy; None without streams."""
    users: int = 0
    """Saved views of it that backward has not asked for yet."""


@dataclass(frozen=True)
class _Packed:
    """Replaces a saved tensor."""

    storage: _OffloadedStorage
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _StreamedOffload:
    """The saved tensors of one forward pass of the layers, and their copies to the host and back.

    Memory is allocated and freed on the compute stream.  The copy stream first waits for what is queued there, and
    the compute stream waits for a copy before it uses or frees what was copied.
    """

    def __init__(self, device: torch.device, allocate: Callable[[int, torch.device], Tensor]) -> None:
        from tonnage.techniques.copies import Copies

        self.device = device
        self.allocate = allocate
        self.copies = Copies(device)
        self.saved: list[weakref.ref[_OffloadedStorage]] = []
        self.leaving: dict[tuple[int, int], _OffloadedStorage] = {}
        """Keyed by storage and version: a storage that was written to since counts as another one."""
        self.hooks: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        import torch
        from torch.autograd.graph import saved_tensors_hooks

        pack, unpack = self.pack, self.unpack
        if "torch._dynamo" in sys.modules:  # between its graphs, what is called would be compiled
            pack, unpack = map(torch.compiler.disable, (pack, unpack))
        self.hooks = saved_tensors_hooks(pack, unpack)
        self.hooks.__enter__()

    def __exit__(self, *raised: Any) -> None:
        """Leave the last storages on the GPU as well: backward needs them first."""
        assert self.hooks is not None
        self.hooks.__exit__(*raised)
        self.leaving.clear()

    def pack(self, tensor: Tensor) -> Any:
        """Copy the storage of a tensor to the host; return what replaces the tensor."""
        if not self._is_offloaded(tensor):
            return tensor.detach()  # an operation that saves its own result would otherwise form a reference cycle
        key = (tensor.untyped_storage()._cdata, tensor._version)
        storage = self.leaving.get(key) or self._send(key, tensor)
        storage.users += 1
        return _Packed(storage, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def _is_offloaded(self, tensor: Tensor) -> bool:
        import torch

        owner = tensor if tensor._base is None else tensor._base
        if tensor.device != self.device or type(tensor) is not torch.Tensor or isinstance(owner, torch.nn.Parameter):
            return False
        return int(tensor.untyped_storage().nbytes()) >= SMALL_BYTES

    def _send(self, key: tuple[int, int], tensor: Tensor) -> _OffloadedStorage:
        import torch

        memory = tensor.untyped_storage()
        as_bytes = torch.empty(0, dtype=torch.uint8, device=self.device).set_(memory, 0, (memory.nbytes(),), (1,))
        host = self.allocate(as_bytes.numel(), self.device)
        done = self.copies.begin(host, as_bytes)
        storage = _OffloadedStorage(number=len(self.saved), host=host, card=as_bytes, done=done)
        self.saved.append(weakref.ref(storage))
        self.leaving[key] = storage
        if len(self.leaving) > LEAVING:
            oldest = self.leaving.pop(next(iter(self.leaving)))
            self.copies.wait(oldest.done)
            oldest.card = None
        return storage

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor, back on the GPU; start to prefetch those that were saved before it."""
        import torch

        if isinstance(packed, torch.Tensor):
            return packed
        storage = packed.storage
        for number in range(storage.number, max(-1, storage.number - AHEAD - 1), -1):
            wanted = self.saved[number]()
            if wanted is not None and (wanted is storage or wanted.users > 0):
                self._fetch(wanted)
        self.copies.wait(storage.done)
        tensor = torch.empty(0, dtype=packed.dtype, device=self.device)
        tensor.set_(storage.card.untyped_storage(), packed.offset, packed.shape, packed.stride)
        storage.users -= 1
        if storage.users <= 0:
            storage.card = None
        return tensor

    def _fetch(self, storage: _OffloadedStorage) -> None:
        import torch

        if storage.card is None:
            storage.card = torch.empty(storage.host.shape, dtype=torch.uint8, device=self.device)
            storage.done = self.copies.begin(storage.card, storage.host)


ACTIVATION_OFFLOAD: Final = Technique(
    option="activation_offload", values=("cpu", "cpu-streamed", "nvme"), accepts=accepts, apply=apply
)
