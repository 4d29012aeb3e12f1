"""Memory of kernels over lists of tensors: a table on the GPU of which thread block works on which tensor.

FSDP2's two kernels (one copies what was gathered into parameters, one gradients into the buffer to reduce) find their
tensors by a table that is copied to the GPU for each call.  The rules are those of ATen/native/cuda/TensorShape.cu;
tests compare them with ghosts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from tonnage.cluster import Device

_BLOCK: Final = 128
"""Threads of a block."""
_TILE_BYTES: Final = 16 * _BLOCK
"""Bytes that the threads of a block copy at a time."""
_ENTRY_BYTES: Final = 8


def split_with_sizes_copy(args: Any, kwargs: Any, device: Device) -> Sequence[int]:
    """Return the bytes of the table for a copy of one tensor's columns into many; none if they differ in dtype.

    It holds both addresses and the size of each part, the part of each block, and where a part's blocks begin.
    """
    whole, sizes, dim = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("dim", 0)
    unsupported = [part for part in (whole, *kwargs["out"]) if not _is_dense(part) or part.dtype != whole.dtype]
    if unsupported:
        return ()
    rows = whole.numel() // math.prod(whole.shape[dim:])
    sizes_bytes = [size * whole.stride(dim) * whole.element_size() for size in sizes]
    most_blocks = device.sms * device.threads_per_sm // _BLOCK * 2
    repetitions = _divide_up(sum(_divide_up(size, _TILE_BYTES) for size in sizes_bytes) * rows, most_blocks)
    rows_by_block = min(math.ceil(math.sqrt(repetitions)), rows)
    tiles = _divide_up(repetitions, rows_by_block)
    blocks = sum(_divide_up(size, _TILE_BYTES * tiles) for size in sizes_bytes)
    return (_ENTRY_BYTES * (4 * len(sizes) + 1 + blocks),)


def chunk_cat(args: Any, kwargs: Any, device: Device) -> Sequence[int]:
    """Return the bytes of the table for a copy of many tensors, each cut into `num_chunks` pieces, into the rows of
    one.

    It holds six numbers for each tensor, two more, and the tensor of each block.  If dtypes differ otherwise than
    from bf16 to fp32, there is no table, but a copy of each tensor that the pieces do not divide evenly.
    """
    tensors, pieces, out = args[0], _argument(args, kwargs, 2, "num_chunks"), _argument(args, kwargs, 3, "out")
    dim = _argument(args, kwargs, 1, "dim")
    dtype_pairs = {(tensor.dtype, out.dtype) for tensor in tensors}
    one_kernel = all(a == b or (a, b) == (torch.bfloat16, torch.float32) for a, b in dtype_pairs)
    padded = [
        tensor.numel() // tensor.shape[dim] * _divide_up(tensor.shape[dim], pieces) * pieces for tensor in tensors
    ]
    if not one_kernel or not all(map(_is_dense, tensors)):
        uneven = zip(tensors, padded, strict=True)
        return [size * tensor.element_size() for tensor, size in uneven if size != tensor.numel()]
    leading = math.prod(tensors[0].shape[:dim])
    blocks = sum(_divide_up(size // leading // pieces * out.element_size(), _TILE_BYTES) for size in padded)
    return (_ENTRY_BYTES * (6 * len(tensors) + 2 + blocks),)


def _argument(args: Any, kwargs: Any, place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs[name]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return True if its elements are contiguous without gaps, in whatever order of dimensions."""
    expected_stride = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected_stride:
            return False
        expected_stride *= size
    return True


def _divide_up(number: int, divisor: int) -> int:
    return -(-number // divisor)


OF: Final = {"split_with_sizes_copy": split_with_sizes_copy, "chunk_cat": chunk_cat}
"""Rules by the operation's name in torch.ops.fsdp."""
