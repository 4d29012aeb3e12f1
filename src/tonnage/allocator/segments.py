"""The state of an allocator at one moment as plain values: segments and their blocks."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

BlockState = Literal["active_allocated", "active_pending_free", "inactive"]
"""State of a block in torch's snapshots: allocated; freed, but perhaps in use by another stream; free."""


class SegmentBlock(NamedTuple):
    """A part of a segment."""

    address: int
    size_bytes: int
    requested_bytes: int
    """Size that the program requested when this block was last allocated."""
    state: BlockState


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Memory from one call of the driver, or one contiguous mapped part of an expandable segment."""

    address: int
    """Start address."""
    stream: int
    """The only stream for which its blocks are allocated."""
    is_small: bool
    """True if it serves requests up to 1 MiB."""
    is_expandable: bool = False
    """True if it is part of an expandable segment."""
    pool: tuple[int, int] = (0, 0)
    """Id of its private pool; (0, 0) for none."""
    blocks: tuple[SegmentBlock, ...]
    """Its blocks in order of address, without gaps."""

    @property
    def size_bytes(self) -> int:
        """Return its reserved bytes."""
        return sum(block.size_bytes for block in self.blocks)

    @property
    def allocated_bytes(self) -> int:
        """Return the bytes of its allocated blocks."""
        return sum(block.size_bytes for block in self.blocks if block.state == "active_allocated")

    @property
    def active_bytes(self) -> int:
        """Return the bytes of its blocks that are allocated, or freed but perhaps in use by another stream."""
        return sum(block.size_bytes for block in self.blocks if block.state != "inactive")
