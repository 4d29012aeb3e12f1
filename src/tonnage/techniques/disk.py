"""Host memory that rests in a file: the system writes its pages out, and reads them back when they are needed.

Files are in TONNAGE_OFFLOAD_DIR (default: the system's folder for temporary files).  They are unlinked as soon as
they are mapped, and disappear with the last tensor on them, however the process ends.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from tonnage.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PREFIX: Final = "tonnage-offload-"
"""Prefix by which a ghost recognises such files; parts that were never written read as zero."""

SMALL_BYTES: Final = 1 << 20
"""Tensors below this size stay in memory: a file for each would cost more than it frees."""


def folder() -> str:
    """Return the folder for the files.  Raises UsageError if it does not exist."""
    path = os.environ.get("TONNAGE_OFFLOAD_DIR") or tempfile.gettempdir()
    if not os.path.isdir(path):
        raise UsageError(f"TONNAGE_OFFLOAD_DIR is {path!r}, which is no folder; set it to an existing one.")
    return path


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a contiguous tensor of zeros in a file of its own."""
    import torch

    descriptor, path = tempfile.mkstemp(prefix=PREFIX, dir=folder())
    os.close(descriptor)
    try:
        flat = torch.from_file(path, shared=True, size=math.prod(shape), dtype=dtype)
    finally:
        os.unlink(path)
    return flat.view(shape)


@contextmanager
def zeros_on_disk() -> Iterator[None]:
    """Put results of `torch.zeros_like` of large host tensors into files: an optimizer's new states."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    creating_ops = (torch.ops.aten.zeros_like.default,)

    class Mode(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            options = kwargs or {}
            if func in creating_ops and _is_large_on_host(args[0], options):
                return empty(tuple(args[0].shape), options.get("dtype") or args[0].dtype)
            return func(*args, **options)

    with Mode():
        yield


def _is_large_on_host(like: Tensor, options: dict[str, Any]) -> bool:
    device = options.get("device") or like.device
    return like.nbytes >= SMALL_BYTES and str(device) == "cpu" and like.is_contiguous()
