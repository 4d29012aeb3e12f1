"""FlashAttention 3 for transformers: what its package asks the allocator for, and nothing computed.

Its kernels want nvcc.  Names and signatures are the package's (hopper/flash_attn_interface.py of 3.0.0), bytes those
of hopper/flash_api.cpp for training on one sequence or several of a length; FlashAttention 4 asks for the same
(flash_attn/cute/interface.py).
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from typing import Any

import torch
from torch import Tensor

ROWS = {64: 128, 96: 64, 128: 64, 192: 64, 256: 64}
"""Queries that a block of backward takes by the rounded width of a head, under a causal mask."""

KEYS = 128
"""Keys of a block, at most."""


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q is (batch, length, heads, width), of k and v fewer heads; the result is as q."""
        batch, length, heads, _ = q.shape
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
        sums = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
        torch.empty(1, dtype=torch.int32, device=q.device)  # what blocks are handed out by
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the three; beside them row sums, fp32 sums of dQ, and where queries share keys of dK and dV."""
        q, k, v, _, _ = ctx.saved_tensors
        batch, length, heads, width = q.shape
        wide = next(size for size in ROWS if width <= size)
        rows, keys = _rounded(length, ROWS[wide]), _rounded(k.shape[1], KEYS)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        sums = [torch.empty(batch, heads, rows, dtype=torch.float32, device=q.device) for _ in range(2)]
        sums.append(torch.empty(batch, heads, rows * wide, dtype=torch.float32, device=q.device))
        if k.shape[2] != heads:
            sums += [torch.zeros(batch, k.shape[2], keys * wide, dtype=torch.float32, device=q.device) for _ in "kv"]
        sums.append(torch.empty(rows // ROWS[wide], batch, heads, dtype=torch.int32, device=q.device))
        return dq, dk, dv


def install() -> None:
    """Give it to transformers, as if the package were there."""
    package = module_from_spec(ModuleSpec("flash_attn_interface", None))
    for name, function in (
        ("flash_attn_func", flash_attn_func),
        ("flash_attn_varlen_func", flash_attn_varlen_func),
        ("flash_attn_with_kvcache", flash_attn_varlen_func),
    ):
        setattr(package, name, function)
    sys.modules[package.__name__] = package


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    **_: Any,
) -> Tensor:
    """Of sequences of one length."""
    out: Tensor = _Attention.apply(q, k, v)
    return out


def flash_attn_varlen_func(*_: Any, **__: Any) -> Tensor:
    """Raises NotImplementedError: of sequences of several lengths nothing is here."""
    raise NotImplementedError


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step
