"""What operations on a card take besides their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from tonnage.portable import reductions

if TYPE_CHECKING:
    from tonnage.device import Device
    from tonnage.record import Recorder

aten = torch.ops.aten

_PRODUCTS: Final = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.addmv, aten.mv, aten.dot}
WORKSPACE_BYTES: Final = {True: 32 * 2**20, False: 8320 * 2**10}
"""cuBLAS's workspace from compute capability 9.0 on, and before: CUDABlas.cpp, parseChosenWorkspaceSize."""


class Temporaries:
    """What each operation takes and gives back, and the workspaces that stay."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._handles: set[bool] = set()

    def __call__(self, recorder: Recorder, op: Any, args: Any, kwargs: Any, result: Any) -> Sequence[int]:
        """Bytes of each block that the operation takes and gives back; a product's first workspace stays."""
        packet = op.overloadpacket
        if packet in _PRODUCTS:
            self._workspace(recorder, args)
            return ()
        rule = _RULES.get(packet)
        return () if rule is None else rule(self._device, args, kwargs, result)

    def _workspace(self, recorder: Recorder, args: Any) -> None:
        """One for each thread: the program's, and autograd's own for the card."""
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward not in self._handles and args[0].device == recorder.device:
            self._handles.add(in_backward)
            recorder.hold(WORKSPACE_BYTES[self._device.capability >= (9, 0)])


Rule = Callable[[Any, Any, Any, Any], Sequence[int]]


def _reduction(device: Device, args: Any, kwargs: Any, result: Any) -> Sequence[int]:
    tensor = args[0]
    if tensor.device.type != "cuda" or not isinstance(result, torch.Tensor):
        return ()
    dims = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else kwargs.get("dim")
    shape = reductions.of(tensor.shape, tensor.stride(), dims)
    return reductions.temporaries(shape, max(4, tensor.element_size()), device)


def _vector_norm(device: Device, args: Any, kwargs: Any, result: Any) -> Sequence[int]:
    return _reduction(device, (args[0], args[2] if len(args) > 2 else None), kwargs, result)


_RULES: Final[dict[Any, Rule]] = {
    aten.sum: _reduction,
    aten.mean: _reduction,
    aten.linalg_vector_norm: _vector_norm,
}
