"""What flash attention's forward takes where few heads and short sequences leave much of the card idle.

It then divides the keys among thread blocks too, each with a result of its own in fp32, added up at the end
(ATen/native/transformers/cuda/flash_attn/flash_api.cpp, num_splits_heuristic).  540 calls on each of four cards, and
on an A100 with six versions of torch, are as on the ghost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from torch.torch_version import TorchVersion

if TYPE_CHECKING:
    from tonnage.cluster import Device

_QUERIES: Final = 64
"""Queries of a thread block."""
_MOST: Final = 128
_ENOUGH: Final = 0.8
"""Part of the card's places for thread blocks that one block for each query block is to fill."""
_GOOD: Final = 0.85
"""Part of the best use of the card with which the smallest number of splits is content."""


def forward(args: Any, kwargs: Any, device: Device, torch_version: str) -> Sequence[int]:
    """Bytes of the parts' logarithms and results; of query and key (batch, heads, tokens, width)."""
    query, key = args[0], args[1]
    dropout = args[3] if len(args) > 3 else kwargs.get("dropout_p", 0.0)
    if dropout or query.device.type != "cuda":
        return ()
    batch, heads, tokens, width = query.shape
    keys_of_block = 256 if width <= 64 else 128 if width <= 128 else 64
    parts = count(
        batch * heads * math.ceil(tokens / _QUERIES), 2 * device.sms, math.ceil(key.shape[2] / keys_of_block)
    )
    if parts == 1:
        return ()
    rows_bytes = 4 * parts * batch * heads * tokens
    step = 64 if width > 128 and TorchVersion(torch_version) >= (2, 11) else 32
    return rows_bytes, rows_bytes * math.ceil(width / step) * step


def count(blocks: int, places: int, key_blocks: int) -> int:
    """Into how many parts keys are divided, for so many thread blocks in so many places."""
    if blocks >= _ENOUGH * places:
        return 1
    possible = range(1, min(_MOST, places, key_blocks) + 1)
    different = [
        parts for parts in possible if parts == 1 or _size(key_blocks, parts) != _size(key_blocks, parts - 1)
    ]
    use = {parts: _use(blocks * parts / places) for parts in different}
    return next(parts for parts in different if use[parts] >= _GOOD * max(use.values()))


def _size(key_blocks: int, parts: int) -> int:
    return math.ceil(key_blocks / parts)


def _use(waves: float) -> float:
    return waves / math.ceil(waves)
