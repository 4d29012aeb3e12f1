"""Memory of flash attention's forward if few heads and short sequences leave much of the GPU idle.

It then divides the keys among thread blocks too, each with a result of its own in fp32, added up at the end
(ATen/native/transformers/cuda/flash_attn/flash_api.cpp, num_splits_heuristic). 540 calls on each of four GPUs, and on
an A100 with six versions of torch, are equal to the ghost's.
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
"""Fraction of the GPU's slots for thread blocks that makes a division unnecessary, at one block per query block."""
_GOOD: Final = 0.85
"""Fraction of the best use of the GPU that is enough for the smallest number of splits."""


def forward(args: Any, kwargs: Any, device: Device, torch_version: str) -> Sequence[int]:
    """Return the bytes of the parts' logarithms and results; query and key are (batch, heads, tokens, width)."""
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
    """Return the number of parts that keys are divided into, for so many thread blocks in so many slots."""
    if blocks >= _ENOUGH * places:
        return 1
    possible = range(1, min(_MOST, places, key_blocks) + 1)
    distinct = [
        parts
        for parts in possible
        if parts == 1 or _blocks_per_part(key_blocks, parts) != _blocks_per_part(key_blocks, parts - 1)
    ]
    use = {parts: _utilisation(blocks * parts / places) for parts in distinct}
    return next(parts for parts in distinct if use[parts] >= _GOOD * max(use.values()))


def _blocks_per_part(key_blocks: int, parts: int) -> int:
    return math.ceil(key_blocks / parts)


def _utilisation(waves: float) -> float:
    return waves / math.ceil(waves)
