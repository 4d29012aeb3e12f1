"""Memory of matrix products on a GPU besides their results: cuBLAS's and cuBLASLt's workspaces.

torch allocates them, one for each thread: the program's, and autograd's for the GPU.  Their size, and whether they
stay, differs by version (ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize); read off ghosts of a T4, an H100,
a B200, a B300 and an RTX 5090 with torch 2.8 to 2.15.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.torch_version import TorchVersion

if TYPE_CHECKING:
    from tonnage.meta.recorder import Recorder

aten = torch.ops.aten

PRODUCTS: Final = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.addmv, aten.mv, aten.dot, aten._scaled_mm)
_LARGE_BYTES: Final = 32 * 2**20
_SMALL_BYTES: Final = 8320 * 2**10
_LT_BYTES: Final = 2**20


class Workspaces:
    """The workspaces of one step; those that stay are allocated once for each thread."""

    def __init__(self, capability: tuple[int, int], torch_version: str) -> None:
        version = TorchVersion(torch_version)
        large = capability >= (9, 0) if version >= (2, 12) else capability == (9, 0)
        self._bytes = _LARGE_BYTES if large else _SMALL_BYTES
        self._both_stay = (2, 9) <= version < (2, 12)
        self._shared = (2, 12) <= version < (2, 15)
        self._are_freed = version >= (2, 15)
        self._held: set[tuple[int, bool]] = set()

    def take(self, recorder: Recorder, op: Any, args: Any, kwargs: Any) -> Sequence[int]:
        """Hold the workspaces that stay after this product; return the bytes of those that it takes and frees."""
        if args[0].device != recorder.device:
            return ()
        by_lt = _uses_cublaslt(op, args, kwargs) and not self._shared
        if self._are_freed:
            return (_LT_BYTES if by_lt else self._bytes,)
        self._hold(recorder, self._bytes)
        if not by_lt:
            return ()
        if self._both_stay:
            self._hold(recorder, _LT_BYTES)
            return ()
        return (_LT_BYTES,)

    def _hold(self, recorder: Recorder, size_bytes: int) -> None:
        one = (size_bytes, torch._C._current_graph_task_id() != -1)  # autograd's thread, or the program's
        if one not in self._held:
            self._held.add(one)
            recorder.hold(size_bytes)


def _uses_cublaslt(op: Any, args: Any, kwargs: Any) -> bool:
    """Return True if cuBLASLt is used: for a bias that each row gets, for products of fp8
    (ATen/native/cuda/Blas.cpp).
    """
    packet = op.overloadpacket
    if packet is not aten.addmm:
        return bool(packet is aten._scaled_mm)
    bias, _, matrix = args[:3]
    whole = bias.dim() == 1 and bias.shape[0] == matrix.shape[1] and min(matrix.shape) > 1
    return bool(whole and kwargs.get("beta", 1) == 1 and bias.is_contiguous())
