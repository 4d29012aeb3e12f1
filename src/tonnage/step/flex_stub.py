"""Flex attention without its compiler, for runs that only compare: torch's flash attention in its place.

To compile it takes ten seconds and more, for each length and micro-batch anew.  What waits for backward is the same:
queries, keys, values, the result, and one number for each row of scores; in backward flash attention has keys' and
values' gradients for every head at once, where heads share them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_HEADS: Final = range(8, 257, 8)
"""Widths of heads that flash attention takes (ATen/native/transformers/cuda/sdp_utils.cpp: up to 256; others than
multiples of 8 torch pads before it calls)."""


def install() -> None:
    """From now on in this process, wherever transformers calls flex attention."""
    from transformers import masking_utils
    from transformers.integrations import flex_attention

    compiled = flex_attention.compile_friendly_flex_attention
    flex_attention.compile_friendly_flex_attention = _instead_of(compiled)
    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register("flex_attention", _no_mask)


def _no_mask(*_given: Any, **_named: Any) -> None:
    """Flash attention hides what comes later by itself; windows keep as much for backward."""


def _instead_of(compiled: Callable[..., Any]) -> Callable[..., Any]:
    def flash(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        import torch

        if query.element_size() != 2 or query.shape[-1] not in _HEADS:
            return compiled(query, key, value, **options)
        result, rows, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, is_causal=True, scale=options.get("scale")
        )
        if "return_aux" in options:  # from torch 2.9 on
            return result, SimpleNamespace(lse=rows)
        return (result, rows) if options.get("return_lse") else result

    return flash
