"""What the allocator holds at one moment, as plain values: segments and the blocks they consist of."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

BlockState = Literal["active_allocated", "active_pending_free", "inactive"]
"""Handed out; freed but perhaps still in use by another stream; free.  The words of torch's snapshots."""


class SegmentBlock(NamedTuple):
    """A part of a segment."""

    address: int
    size_bytes: int
    requested_bytes: int
    """What the program asked for when this block was last handed out."""
    state: BlockState


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Memory obtained from the driver at once, or one contiguous mapped part of an expandable segment."""

    address: int
    """Where it begins."""
    stream: int
    """The only stream for which its blocks are handed out."""
    is_small: bool
    """Whether it serves requests up to 1 MiB."""
    is_expandable: bool = False
    """Whether it is part of an expandable segment."""
    pool: tuple[int, int] = (0, 0)
    """The private pool it belongs to; (0, 0) for none."""
    blocks: tuple[SegmentBlock, ...]
    """Its parts in order of their addresses, without gaps."""

    @property
    def size_bytes(self) -> int:
        """Its reserved bytes."""
        return sum(block.size_bytes for block in self.blocks)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the blocks that the program holds."""
        return sum(block.size_bytes for block in self.blocks if block.state == "active_allocated")

    @property
    def active_bytes(self) -> int:
        """Bytes of the blocks that are held, or freed and perhaps still in use."""
        return sum(block.size_bytes for block in self.blocks if block.state != "inactive")
