"""Activation offload: what the layers keep for backward waits in pinned host memory.

`cpu`: torch's own `save_on_cpu(pin_memory=True)`.  Every saved tensor is copied when it is saved and copied back when
it is needed, on the stream that computes, weights included.  `cpu-streamed`: copies on a stream of their own, beside
the computation; weights and tensors below SMALL_BYTES stay; each piece of memory is copied once however many tensors
look at it.  `nvme`: the same, into files (see `disk`).  All act inside the module that holds the layers, so that
head and loss keep what they need on the card, and outside of checkpointing, whose layers then give away their inputs
alone.
"""

from __future__ import annotations

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
"""Tensors below it are not worth a copy."""

LEAVING: Final = 2
"""Copies to the host that may be under way at once; the card keeps their tensors until they are done."""

AHEAD: Final = 2
"""Copies back to the card that begin before they are asked for."""


def accepts(case: Case) -> Refusal | None:
    """torch's own offload makes plain tensors, into which those that ranks divide (DTensor) cannot be copied."""
    if case.plan.activation_offload == "cpu" and case.plan.tp > 1:
        return Refusal(
            technique="activation_offload=cpu",
            reason="torch's save_on_cpu knows no tensors that are divided among the ranks of tp",
            instead="choose activation-offload cpu-streamed, which leaves those on the card, or nvme",
        )
    return None


def apply(step: Step) -> Step:
    """Offload inside every module that holds layers."""
    if step.plan.checkpointing.startswith("budget") and step.plan.activation_offload == "cpu-streamed":
        return step  # the budget chooses what goes, and sends it
    device = step.world.device
    chosen: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "cpu": partial(_saved_by_torch, device),
        "cpu-streamed": partial(_Streamed, device, _in_memory),
        "nvme": partial(_Streamed, device, _in_a_file),
    }
    new = chosen[step.plan.activation_offload]
    return replace(step, changes=(*step.changes, partial(_offloading, new=new)))


def _in_memory(count_bytes: int, device: torch.device) -> Tensor:
    import torch

    return torch.empty(count_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _in_a_file(count_bytes: int, device: torch.device) -> Tensor:
    import torch

    return disk.empty((count_bytes,), torch.uint8)


def _offloading(module: nn.Module, new: Callable[[], AbstractContextManager[Any]]) -> nn.Module:
    from tonnage.techniques.checkpointing import layer_lists_of

    layer_lists_of(module)  # there must be some
    for holder in _holders(module):
        holder.forward = _inside(holder.forward, new)  # type: ignore[method-assign]
    return module


def _holders(module: nn.Module) -> list[nn.Module]:
    """The modules whose children are lists of layers: a decoder, or an encoder and a decoder."""
    from tonnage.step.model import layer_lists

    lists = [child for child in module.children() if layer_lists(child) == [list(child.children())]]
    rest = [child for child in module.children() if child not in lists]
    return [*([module] if lists else []), *(found for child in rest for found in _holders(child))]


def _inside(forward: Callable[..., Any], new: Callable[[], AbstractContextManager[Any]]) -> Callable[..., Any]:
    @wraps(forward)
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        with new():
            return forward(*args, **kwargs)

    return offloaded


def _saved_by_torch(device: torch.device) -> AbstractContextManager[Any]:
    from torch.autograd.graph import save_on_cpu

    hooks: AbstractContextManager[Any] = save_on_cpu(pin_memory=device.type == "cuda")
    return hooks


@dataclass(eq=False)
class _Stay:
    """One piece of memory that was saved, away from the card."""

    number: int
    """In the order of saving."""
    host: Tensor
    """Its copy, as bytes."""
    card: Tensor | None
    """The piece itself: until its copy to the host is done, and again from when it comes back."""
    done: Any
    """The event of the latest copy; None where there are no streams."""
    users: int = 0
    """Saved tensors that look at it and were not asked for yet."""


@dataclass(frozen=True)
class _Packed:
    """Stands for a saved tensor."""

    stay: _Stay
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Streamed:
    """The saved tensors of one forward pass of the layers, and their way to the host and back.

    Memory is handed out and taken back on the stream that computes; the copying stream first waits for what that has
    queued, and the computing stream waits for a copy before it uses, or lets go of, what was copied.
    """

    def __init__(self, device: torch.device, room: Callable[[int, torch.device], Tensor]) -> None:
        from tonnage.techniques.copies import Copies

        self.device = device
        self.room = room
        self.copies = Copies(device)
        self.stays: list[weakref.ref[_Stay]] = []
        self.leaving: dict[tuple[int, int], _Stay] = {}
        """By memory and its version: a piece that was written to since is another one."""
        self.hooks: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        from torch.autograd.graph import saved_tensors_hooks

        self.hooks = saved_tensors_hooks(self.pack, self.unpack)
        self.hooks.__enter__()

    def __exit__(self, *raised: Any) -> None:
        """The last pieces stay on the card as well: backward asks for them first."""
        assert self.hooks is not None
        self.hooks.__exit__(*raised)
        self.leaving.clear()

    def pack(self, tensor: Tensor) -> Any:
        """Send the memory of a tensor away; what is returned stands for the tensor."""
        if not self._goes(tensor):
            return tensor.detach()  # an operation that kept its own result would be kept by it, backward or not
        key = (tensor.untyped_storage()._cdata, tensor._version)
        stay = self.leaving.get(key) or self._send(key, tensor)
        stay.users += 1
        return _Packed(stay, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def _goes(self, tensor: Tensor) -> bool:
        import torch

        owner = tensor if tensor._base is None else tensor._base
        if tensor.device != self.device or type(tensor) is not torch.Tensor or isinstance(owner, torch.nn.Parameter):
            return False
        return int(tensor.untyped_storage().nbytes()) >= SMALL_BYTES

    def _send(self, key: tuple[int, int], tensor: Tensor) -> _Stay:
        import torch

        storage = tensor.untyped_storage()
        piece = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage, 0, (storage.nbytes(),), (1,))
        host = self.room(piece.numel(), self.device)
        stay = _Stay(number=len(self.stays), host=host, card=piece, done=self.copies.begin(host, piece))
        self.stays.append(weakref.ref(stay))
        self.leaving[key] = stay
        if len(self.leaving) > LEAVING:
            gone = self.leaving.pop(next(iter(self.leaving)))
            self.copies.wait(gone.done)
            gone.card = None
        return stay

    def unpack(self, packed: Any) -> Tensor:
        """The tensor, back on the card; those saved before it begin to follow."""
        import torch

        if isinstance(packed, torch.Tensor):
            return packed
        stay = packed.stay
        for number in range(stay.number, max(-1, stay.number - AHEAD - 1), -1):
            wanted = self.stays[number]()
            if wanted is not None and (wanted is stay or wanted.users > 0):
                self._fetch(wanted)
        self.copies.wait(stay.done)
        tensor = torch.empty(0, dtype=packed.dtype, device=self.device)
        tensor.set_(stay.card.untyped_storage(), packed.offset, packed.shape, packed.stride)
        stay.users -= 1
        if stay.users <= 0:
            stay.card = None
        return tensor

    def _fetch(self, stay: _Stay) -> None:
        import torch

        if stay.card is None:
            stay.card = torch.empty(stay.host.shape, dtype=torch.uint8, device=self.device)
            stay.done = self.copies.begin(stay.card, stay.host)


ACTIVATION_OFFLOAD: Final = Technique(
    option="activation_offload", values=("cpu", "cpu-streamed", "nvme"), accepts=accepts, apply=apply
)
