"""What operations on a card take besides their results, from a table that a ghost made and from known rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._pytree import tree_leaves

from tonnage.portable import packed, quantities, reductions

if TYPE_CHECKING:
    from tonnage.device import Device
    from tonnage.record import Recorder

aten = torch.ops.aten
Table = Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]
"""By operation and variant: from which compute capability on which blocks are taken, each as bytes by number."""

_PRODUCTS: Final = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.addmv, aten.mv, aten.dot, aten._scaled_mm)
_SUMS: Final = {aten.sum: 1, aten.mean: 1, aten.linalg_vector_norm: 2}
"""Reductions, and at which place they are given their dimensions."""
_NORMS: Final = {aten.native_layer_norm: 1, aten.native_layer_norm_backward: 2}
"""Operations that first copy those of so many first arguments that are not contiguous (layer_norm_kernel.cu)."""
WORKSPACE_BYTES: Final = {True: 32 * 2**20, False: 8320 * 2**10}
"""cuBLAS's workspace from compute capability 9.0 on, and before (CUDABlas.cpp, parseChosenWorkspaceSize)."""


def _on_card(result: Any) -> bool:
    return any(leaf.device.type == "cuda" for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))


def _bytes(tensor: torch.Tensor) -> int:
    count: int = tensor.numel() * tensor.element_size()
    return count


class Temporaries:
    """What each operation takes and gives back, and the workspaces that stay."""

    def __init__(self, device: Device, table: Table) -> None:
        self._device = device
        self._table = table
        self._handles: set[bool] = set()

    def before(self, op: Any, args: Any) -> Sequence[int]:
        """Bytes of each copy that is made of an argument before there is room for the result."""
        packet = getattr(op, "overloadpacket", None)
        if packet not in _NORMS:
            return ()
        return [_bytes(each) for each in args[: _NORMS[packet]] if _on_card(each) and not each.is_contiguous()]

    def __call__(self, recorder: Recorder, op: Any, args: Any, kwargs: Any, result: Any) -> Sequence[int]:
        """Bytes of each block that the operation takes and gives back; a product's first workspace stays."""
        packet = getattr(op, "overloadpacket", None)
        if packet in _PRODUCTS:
            self._hold_workspace(recorder, args[0])
        elif packet in _SUMS:
            return self._partial_sums(args, kwargs, _SUMS[packet])
        elif packet is not None and op.namespace == "fsdp" and packet.__name__ in packed.OF:
            return packed.OF[packet.__name__](args, kwargs, self._device)
        elif packet is not None and packet.__name__ in self._table and _on_card(result):
            return self._blocks(packet.__name__, quantities.OF[packet.__name__](args, kwargs, result))
        return ()

    def _hold_workspace(self, recorder: Recorder, tensor: torch.Tensor) -> None:
        """One for each thread that multiplies: the program's, and autograd's own for the card."""
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward not in self._handles and tensor.device == recorder.device:
            self._handles.add(in_backward)
            recorder.hold(WORKSPACE_BYTES[self._device.capability >= (9, 0)])

    def _partial_sums(self, args: Any, kwargs: Any, place: int) -> Sequence[int]:
        tensor = args[0]
        if tensor.device.type != "cuda":
            return ()
        dims = args[place] if len(args) > place else kwargs.get("dim")
        reduced = reductions.of(tensor.shape, tensor.stride(), dims if isinstance(dims, list | tuple) else None)
        return reductions.temporaries(reduced, max(4, tensor.element_size()), self._device)

    def _blocks(self, name: str, call: quantities.Quantities) -> Sequence[int]:
        known = self._table[name].get(call.variant, ())
        fitting = [entry for entry in known if tuple(entry["capability"]) <= self._device.capability]
        blocks = fitting[-1]["blocks"] if fitting else ()
        return [round(sum(weight * call.numbers[number] for number, weight in each.items())) for each in blocks]
