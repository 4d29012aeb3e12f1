"""Memory of operations on a GPU besides their results, from a table that a ghost made and from known rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._pytree import tree_leaves

from tonnage.meta import packed, quantities, reductions, splits
from tonnage.meta.workspaces import PRODUCTS, Workspaces

if TYPE_CHECKING:
    from tonnage.cluster import Device
    from tonnage.meta.recorder import Recorder

aten = torch.ops.aten
Table = Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]
"""By operation and variant: the blocks from each compute capability on, each as bytes per quantity."""

_SUMS: Final = {aten.sum: 1, aten.mean: 1, aten.linalg_vector_norm: 2}
"""Reductions, and the index of the argument with their dimensions."""
_NORMS: Final = {aten.native_layer_norm: 1, aten.native_layer_norm_backward: 2}
"""Operations that first copy non-contiguous ones among that many first arguments (layer_norm_kernel.cu)."""


def _is_on_card(result: Any) -> bool:
    return any(leaf.device.type == "cuda" for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))


def _copy_to_dtype(tensor: torch.Tensor, result: torch.Tensor) -> Sequence[int]:
    """Return the bytes of the copy of a tensor with another dtype than the result's."""
    return () if tensor.dtype == result.dtype else (tensor.numel() * result.element_size(),)


def _size_bytes(tensor: torch.Tensor) -> int:
    count: int = tensor.numel() * tensor.element_size()
    return count


class Temporaries:
    """The blocks that each operation takes and frees, and the workspaces that stay."""

    def __init__(self, device: Device, table: Table) -> None:
        self._device = device
        self._table = table
        self._workspaces = Workspaces(device.capability, torch.__version__)

    def before(self, op: Any, args: Any) -> Sequence[int]:
        """Return the bytes of each copy of an argument that is made before the result is allocated."""
        packet = getattr(op, "overloadpacket", None)
        if packet not in _NORMS:
            return ()
        copied = (tensor for tensor in args[: _NORMS[packet]] if _is_on_card(tensor) and not tensor.is_contiguous())
        return [_size_bytes(tensor) for tensor in copied]

    def __call__(self, recorder: Recorder, op: Any, args: Any, kwargs: Any, result: Any) -> Sequence[int]:
        """Return the bytes of each block that the operation takes and frees; a product's first workspace stays."""
        packet = getattr(op, "overloadpacket", None)
        if packet in PRODUCTS:
            return self._workspaces.take(recorder, op, args, kwargs)
        if packet in _SUMS:
            return self._partial_sums(args, kwargs, _SUMS[packet])
        if packet is aten._scaled_dot_product_flash_attention:
            return splits.forward(args, kwargs, self._device, torch.__version__)
        if packet is not None and op.namespace == "fsdp" and packet.__name__ in packed.OF:
            return packed.OF[packet.__name__](args, kwargs, self._device)
        if packet is not None and packet.__name__ in self._table and _is_on_card(result):
            known = self._blocks(packet.__name__, quantities.OF[packet.__name__](args, kwargs, result))
            return (*_copy_to_dtype(args[0], result), *known) if packet is aten.cumsum else known
        return ()

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
        return [round(sum(weight * call.numbers[number] for number, weight in block.items())) for block in blocks]
