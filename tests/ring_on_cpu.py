"""Runs torch's ring attention, which knows CUDA's kernels only, on the CPU, for comparisons in tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.nn import functional

aten = torch.ops.aten
Tensor = torch.Tensor


@contextmanager
def ring_on_cpu() -> Iterator[None]:
    """Replace CUDA's flash attention, which the ring calls by name, by the CPU's kernels."""
    _register()
    original = functional.scaled_dot_product_attention

    def attention(
        query: Tensor, key: Tensor, value: Tensor, *_: Any, is_causal: bool, scale: float, **__: Any
    ) -> Any:
        return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, False, scale=scale)[0]

    attention.__name__ = original.__name__  # by which torch puts its ring in the place of the function
    functional.scaled_dot_product_attention = attention  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


@cache
def _register() -> Any:
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", _forward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", _backward, "CPU")
    return library  # which takes the kernels away when it goes


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    scale: float | None = None,
) -> Any:
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout, is_causal, scale=scale
    )
    none, state = torch.zeros(()), torch.zeros((), dtype=torch.uint64)
    return out, logsumexp, none, none, query.shape[2], key.shape[2], state, state, none


def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    _cum_q: Tensor,
    _cum_k: Tensor,
    _max_q: int,
    _max_k: int,
    dropout: float,
    is_causal: bool,
    _seed: Tensor,
    _offset: Tensor,
    scale: float | None = None,
) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, out, logsumexp, dropout, is_causal, scale=scale
    )
