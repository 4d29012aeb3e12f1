"""The paged cache of transformers' continuous batching: how much of the free memory becomes cache.

Its memory handler sets aside what a batch of M tokens and each readable token of the cache need, and turns the rest
into sectors (transformers 5.23, generation/continuous_batching/cache.py; a test compares the two).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, lcm
from typing import Final

from tonnage.errors import CannotEstimate
from tonnage.serving.kv_cache import LayerCache
from tonnage.timing.shape import Shape

PAGE_TOKENS: Final = 256
"""Tokens of a page by default."""

_ALIGNMENT: Final = 128
_BLOCKS_OF_REQUEST: Final = 32
"""Rows of the block table that flash attention's decode path keeps for each token of a batch."""


@dataclass(frozen=True, kw_only=True)
class SectorCache:
    """A cache of equal sectors, each of which belongs to the layers of one kind at a time."""

    sectors: int
    sector_bytes: int
    sector_tokens: int
    """Tokens that a sector holds of the kind of layers that gets most tokens into it."""

    @property
    def bytes(self) -> int:
        """Return the bytes of all sectors."""
        return self.sectors * self.sector_bytes


def plan_sectors(
    shape: Shape,
    layers: Sequence[LayerCache],
    *,
    available_bytes: int,
    batch_tokens: int,
    requests: int,
    flash: bool,
    element_bytes: int = 2,
) -> SectorCache:
    """Return the cache that the handler makes of so many bytes: the free memory times `max_memory_percent`.

    `flash`: flash attention is installed, which needs no masks; then steps overlap (asynchronous batching).
    Raises CannotEstimate for layers that keep states.
    """
    kinds = {layer.kind for layer in layers}
    if not layers or "state" in kinds or shape.latent_rank:
        raise CannotEstimate("transformers' continuous batching pages plain attention only.")
    blocks = {kind: sum(layer.token_bytes for layer in layers if layer.kind == kind) * PAGE_TOKENS for kind in kinds}
    sector_bytes = lcm(*blocks.values(), _ALIGNMENT)
    sector_tokens = max(sector_bytes // block * PAGE_TOKENS for block in blocks.values())
    copies = 2 if flash else 1  # of input and output, where the next batch is prepared while one runs
    fast = _BLOCKS_OF_REQUEST if flash and kinds == {"full"} else 0
    read_heads = 2 * shape.kv_heads if flash else 2 * shape.heads + shape.kv_heads
    attention = shape.hidden + (shape.heads + 2 * shape.kv_heads + read_heads) * shape.head_dim
    batch_bytes = attention * element_bytes + copies * (7 * 4 + 4 + len(kinds) * (fast * 4 + 16))
    token_bytes = read_heads * shape.head_dim * element_bytes + copies * len(kinds) * 8
    fixed = 2 * sector_bytes + requests * (shape.hidden * element_bytes + shape.vocab * 4)
    masks = 0 if flash else 2 if "window" in kinds else 1
    each = sector_bytes + sector_tokens * token_bytes
    sectors = (available_bytes - fixed - batch_tokens * batch_bytes) // each
    per_mask = copies * masks * element_bytes * batch_tokens
    mask_bytes = per_mask * (sectors * sector_tokens + batch_tokens)
    sectors -= ceil(mask_bytes / (each + per_mask * sector_tokens))
    return SectorCache(sectors=max(0, sectors), sector_bytes=sector_bytes, sector_tokens=sector_tokens)
