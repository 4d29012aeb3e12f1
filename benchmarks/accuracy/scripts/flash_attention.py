"""FlashAttention 2 for Transformer Engine, by torch's operation: the same kernels, which ask for the same memory.

Its package's kernels want nvcc.  Only what Transformer Engine calls is here, with the package's names and signatures
(flash_attn/flash_attn_interface.py of 2.7.4).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

VERSION = "2.7.4"
"""NVIDIA's PyTorch containers of 2025 and 2026 have 2.7.4."""

Sizes = tuple[Tensor | None, Tensor | None, int, int]
"""Where rows of queries and of keys begin, and how long the longest of each is."""


def install() -> None:
    """Give it to Transformer Engine, as if the package were there."""
    from packaging.version import Version
    from transformer_engine.pytorch.attention.dot_product_attention import backends

    backends.fa_utils.version = Version(VERSION)
    backends.fa_utils.set_flash_attention_version()
    backends.flash_attn_func = attention
    backends.flash_attn_varlen_func = attention_of_rows
    backends._flash_attn_fwd = forward
    backends._flash_attn_varlen_fwd = forward_of_rows
    backends._flash_attn_bwd = backward
    backends._flash_attn_varlen_bwd = backward_of_rows


def attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, **options: Any) -> Tensor:
    """`flash_attn_func`: q, k, v are (batch, length, heads, width)."""
    return _forward(q, k, v, (None, None, q.shape[1], k.shape[1]), dropout_p, **options)[0]


def attention_of_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    **options: Any,
) -> Tensor:
    """`flash_attn_varlen_func`: q, k, v are (tokens, heads, width)."""
    return _forward(q, k, v, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), dropout_p, **options)[0]


def forward(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, **options: Any) -> tuple[Tensor, ...]:
    """`_flash_attn_forward`: result, log-sums, no scores, state of the dice."""
    return _forward(q, k, v, (None, None, q.shape[1], k.shape[1]), dropout_p, **options)


def forward_of_rows(
    q: Tensor, k: Tensor, v: Tensor, *sizes: Any, dropout_p: float, **options: Any
) -> tuple[Tensor, ...]:
    """`_flash_attn_varlen_forward`."""
    return _forward(q, k, v, sizes, dropout_p, **options)  # type: ignore[arg-type]


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sizes: Sizes,
    dropout_p: float,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    window_size_left: int = -1,
    window_size_right: int = -1,
    **rest: Any,
) -> tuple[Tensor, ...]:
    left, right = window_size if window_size != (-1, -1) else (window_size_left, window_size_right)
    window: dict[str, int] = {}
    if left >= 0 or (right >= 0 and not causal):
        window = {"window_size_left": left, "window_size_right": right}
    out, sums, state, _, scores = torch.ops.aten._flash_attention_forward(
        q, k, v, *sizes, dropout_p, causal, False, scale=softmax_scale, **window
    )
    return out, sums, scores, state


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, dq: Tensor, *rest: Any, **options: Any
) -> None:
    """`_flash_attn_backward`: gradients go to where they are wanted; what `mha_bwd` of flash_api.cpp makes beside."""
    _temporaries(q, k, q.shape[0], _rounded(q.shape[1], 128), options.get("deterministic", False))


def backward_of_rows(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, dq: Tensor, *rest: Any, **options: Any
) -> None:
    """`_flash_attn_varlen_backward`; rows are rounded up together (`mha_varlen_bwd`)."""
    given = (*rest, *options.values())
    starts = next(value for value in given if isinstance(value, Tensor) and value.dtype == torch.int32)
    _temporaries(q, k, 1, q.shape[0] + 128 * (starts.numel() - 1), options.get("deterministic", False))


def _temporaries(q: Tensor, k: Tensor, batch: int, length: int, repeatable: bool) -> None:
    """Row sums of the gradient, fp32 sums of dQ, and where queries share keys their gradients for every query head.

    `length` is the rounded one of queries.  A repeatable result takes sums of dQ for each group of blocks.
    """
    heads, width = q.shape[-2:]
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    parts = -(-processors // (batch * heads)) if repeatable else 1
    kept = [
        torch.empty(batch, heads, length, device=q.device),
        torch.empty(parts, batch, length, heads, _rounded(width, 32), device=q.device),
    ]
    if k.shape[-2] != heads:
        kept += [torch.empty(*k.shape[:-2], heads, width, dtype=q.dtype, device=q.device) for _ in "kv"]


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step
