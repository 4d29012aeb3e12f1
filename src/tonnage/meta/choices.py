"""Choices of torch's composite operations on a GPU: the kernel of attention, dropout with its mask, and the like.

The choices are those of ATen/native/transformers/cuda/sdp_utils.cpp and of composites that check `is_cuda()`;
`benchmarks/portable/attention.py` compares the former with the real code's on a ghost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch.nn import functional

from tonnage.cluster import CUDNN_FIRST

_HALF: Final = (torch.float16, torch.bfloat16)
aten = torch.ops.aten

FLASH, EFFICIENT, MATH, CUDNN = "flash", "efficient", "math", "cudnn"


@contextmanager
def on_card(
    capability: tuple[int, int], masked_in_place: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Iterator[None]:
    """Make composites on fake tensors of the GPU do what they do on a real one.

    `masked_in_place` is entered around the addition of scores and mask, which is in place for real tensors.
    """
    library = torch.library.Library("aten", "IMPL")
    attend = partial(attention, capability=capability, masked_in_place=masked_in_place)
    for name, kernel in (
        ("scaled_dot_product_attention", attend),
        ("dropout", _dropout),
        ("softmax.int", _softmax),
        ("log_softmax.int", _log_softmax),
    ):
        library.impl(name, kernel, "AutogradCUDA", allow_override=True)
    for name in _ONE_KERNEL:
        if hasattr(aten, name):
            library.impl(name, _never_called, "CUDA", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


_ONE_KERNEL: Final = ("silu_backward", "mish_backward", "_fused_rms_norm", "_fused_rms_norm_backward")
"""Operations with one kernel on a GPU; on other devices, which lack it, they are several operations.

They are the only ones of torch 2.13's 3,110 in which its two builds differ in this way (measured 2026-11).
"""


def _never_called(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("fake tensors have no kernels")


def _dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if p == 0 or not train or tensor.numel() == 0:
        return tensor
    if p == 1:
        return tensor * torch.zeros((), dtype=tensor.dtype, device=tensor.device)
    result: torch.Tensor = aten.native_dropout(tensor, p, train)[0]
    return result


def _softmax(tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _convert_and_run(aten._softmax, tensor, dim, dtype)


def _log_softmax(tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _convert_and_run(aten._log_softmax, tensor, dim, dtype)


def _convert_and_run(kernel: Any, tensor: torch.Tensor, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
    """Run the kernel; it converts fp16 to fp32 itself, other conversions come before it."""
    in_kernel = tensor.dtype == torch.float16 and dtype == torch.float32
    converted = tensor if dtype is None or in_kernel else tensor.to(dtype)
    result: torch.Tensor = kernel(converted, dim, in_kernel)
    return result


# ---- attention ---------------------------------------------------------------------------------------------------


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    capability: tuple[int, int],
    masked_in_place: Callable[[], AbstractContextManager[None]],
) -> torch.Tensor:
    """Return torch's scaled_dot_product_attention; query, key and value are (batch, heads, tokens, width)."""
    kernel = choose_kernel(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, capability)
    if attn_mask is not None and attn_mask.dtype == torch.bool and kernel != MATH:
        attn_mask = _additive_mask(attn_mask, query.dtype)
    needs_gradient = torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value))
    result: torch.Tensor
    if kernel == FLASH:
        width = query.shape[-1]
        padding = -width % 8
        scale = scale if scale is not None or not padding else 1 / math.sqrt(width)
        query, key, value = (_padded(part, padding) for part in (query, key, value))
        result = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return result[..., :width] if padding else result
    if kernel == EFFICIENT:
        bias = None if attn_mask is None else _align_mask(attn_mask, query, key)
        result = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, needs_gradient, dropout_p, is_causal, scale=scale
        )[0]
        return result
    if kernel == CUDNN:
        result = aten._scaled_dot_product_cudnn_attention(
            query, key, value, attn_mask, needs_gradient, dropout_p, is_causal, False, scale=scale
        )[0]
        return result
    with masked_in_place():
        result = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    return result


def _padded(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    return functional.pad(tensor, (0, columns)) if columns else tensor


def _additive_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a boolean mask as one of zeros and infinities."""
    zero, low = (torch.scalar_tensor(number, dtype=dtype, device=mask.device) for number in (0.0, -math.inf))
    return torch.where(mask, zero, low)


def _align_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return the mask for each head, with rows that begin at multiples of 16 elements."""
    columns = mask.shape[-1]
    padding = -columns % 16
    if padding:
        mask = functional.pad(mask, (0, padding))[..., :columns]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def choose_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    gqa: bool,
    capability: tuple[int, int],
) -> str:
    """Return the kernel that torch takes: the first that supports the call, in the GPU's order.  Raises
    RuntimeError.
    """
    allowed = torch.backends.cuda
    dense = all(part.stride(-1) == 1 for part in (query, key, value, mask) if part is not None)
    flash, efficient = allowed.flash_sdp_enabled() and dense, allowed.mem_efficient_sdp_enabled() and dense
    may = {
        FLASH: flash and _can_use_flash(query, key, value, mask, dropout, causal, gqa, capability),
        EFFICIENT: efficient and _can_use_efficient(query, key, value, capability),
        MATH: allowed.math_sdp_enabled(),
        CUDNN: allowed.cudnn_sdp_enabled() and dense and _can_use_cudnn(query, key, value, mask, dropout, capability),
    }
    prefers_cudnn = torch.__version__ >= (2, 10) and capability in CUDNN_FIRST
    order = (CUDNN, FLASH, EFFICIENT, MATH) if prefers_cudnn else (FLASH, EFFICIENT, MATH, CUDNN)
    for kernel in order:
        if may[kernel]:
            return kernel
    raise RuntimeError("No available kernel. Aborting execution.")


def _can_use_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    gqa: bool,
    capability: tuple[int, int],
) -> bool:
    width = query.shape[-1]
    if query.dim() != 4 or mask is not None or query.dtype not in _HALF or capability < (8, 0):
        return False
    if width > 256 or {key.shape[-1], value.shape[-1]} != {width} or 0 in (query.shape[2], key.shape[2]):
        return False
    if not _have_matching_heads(query, key, value, gqa) or (causal and query.shape[2] != key.shape[2]):
        return False
    trains = torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value))
    small = (8, 6) <= capability <= (8, 9) or capability[0] == 12
    return not (trains and small and bool(192 < width <= 224 or (width > 224 and dropout > 0)))


def _can_use_efficient(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, capability: tuple[int, int]
) -> bool:
    if query.dim() != 4 or query.dtype not in (*_HALF, torch.float32) or capability < (5, 0):
        return False
    if query.dtype == torch.bfloat16 and capability < (8, 0):
        return False
    if not _have_matching_heads(query, key, value, gqa=False):
        return False
    narrow = query.dtype != torch.float32
    alignment = 8 if narrow and capability >= (7, 0) else 4 if narrow or capability >= (8, 0) else 1
    widths = (query.shape[-1], value.shape[-1])
    return all(width % alignment == 0 for width in widths) and bool(query.shape[-1] == key.shape[-1])


def _can_use_cudnn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    capability: tuple[int, int],
) -> bool:
    if query.dim() != 4 or query.dtype not in _HALF or capability < (8, 0):
        return False
    if (dropout > 0 and torch.__version__ >= (2, 12)) or (mask is not None and mask.requires_grad):
        return False
    widest = 256 if capability == (9, 0) else 128
    widths = (query.shape[-1], value.shape[-1])
    fits = all(width % 8 == 0 and width <= widest for width in widths)
    latent = capability[0] == 10 and widths == (192, 128)  # DeepSeek's attention
    return (fits or latent) and query.shape[1] % key.shape[1] == 0


def _have_matching_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gqa: bool) -> bool:
    batches, heads = ({part.shape[place] for part in (query, key, value)} for place in (0, 1))
    if len(batches) > 1 or key.shape[1] != value.shape[1]:
        return False
    return len(heads) == 1 or (gqa and query.shape[1] % key.shape[1] == 0)
