"""Flex attention without its compiler, for runs that only compare: torch's flash attention replaces it.

Compiling takes ten seconds and more, again for each length and micro-batch.  Flash attention keeps the same for
backward: queries, keys, values, the result, and one number for each row of scores.  In backward it needs the
gradients of keys and values of every head at once, where heads share them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_HEAD_WIDTHS: Final = range(8, 257, 8)
"""Widths of heads that flash attention takes (ATen/native/transformers/cuda/sdp_utils.cpp: up to 256); torch pads
others than multiples of 8 before it calls it.
"""


def install() -> None:
    """Replace flex attention for the rest of this process, wherever transformers calls it."""
    from transformers import masking_utils
    from transformers.integrations import flex_attention

    compiled = flex_attention.compile_friendly_flex_attention
    flex_attention.compile_friendly_flex_attention = _flash_for(compiled)
    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register("flex_attention", _no_mask)


def _no_mask(*_given: Any, **_named: Any) -> None:
    """Return no mask: flash attention is causal by itself, and windows keep as much for backward."""


def _flash_for(compiled: Callable[..., Any]) -> Callable[..., Any]:
    def flash(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        import torch

        if query.element_size() != 2 or query.shape[-1] not in _HEAD_WIDTHS:
            return compiled(query, key, value, **options)
        result, rows, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, is_causal=True, scale=options.get("scale")
        )
        if "return_aux" in options:  # from torch 2.9 on
            return result, SimpleNamespace(lse=rows)
        return (result, rows) if options.get("return_lse") else result

    return flash
