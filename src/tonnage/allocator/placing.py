"""Restoring the segments that an allocator had before a recording began."""

from collections.abc import Iterable

from tonnage.allocator.blocks import Block, Pool
from tonnage.allocator.caching import CachingAllocator
from tonnage.allocator.heap import Heap
from tonnage.allocator.segments import Segment, SegmentBlock
from tonnage.errors import CannotEstimate


def restore(allocator: CachingAllocator, segments: Iterable[Segment]) -> dict[int, int]:
    """Add these segments, obtained in this order, before the program's first request.

    Returns the tickets of the blocks that wait for other streams, by address (see `CachingAllocator.complete`).
    Raises CannotEstimate for expandable segments, because the addresses that they reserved are not known.
    """
    tickets: dict[int, int] = {}
    for segment in segments:
        if segment.is_expandable:
            raise CannotEstimate(
                "An expandable segment cannot be restored, because the addresses that it reserved are not known; "
                "record from the start of the program."
            )
        pool = allocator.heap.small if segment.is_small else allocator.heap.large
        head = _place_segment(allocator.heap, segment.address, segment.size_bytes, segment.stream, pool)
        pool.remove(head)
        _split_into(allocator.heap, head, segment.blocks)
        for block in segment.blocks:
            if block.state == "active_pending_free":
                tickets[block.address] = allocator.free(block.address, held=True)
    allocator.events.clear()
    return tickets


def _place_segment(heap: Heap, address: int, size: int, stream: int, pool: Pool) -> Block:
    """Add a segment at the address at which the real allocator obtained it."""
    heap.driver.create(size)
    block = heap.add_segment(address, size, stream, pool)
    pool.add(block)
    return block


def _split_into(heap: Heap, rest: Block, parts: tuple[SegmentBlock, ...]) -> None:
    """Split a new segment into blocks; the last part keeps the segment's Block object."""
    is_split = len(parts) > 1
    for part in parts[:-1]:
        front = heap.split_front(rest, part.size_bytes)
        _set_state(heap, front, part, is_split)
    _set_state(heap, rest, parts[-1], is_split)


def _set_state(heap: Heap, block: Block, part: SegmentBlock, is_split: bool) -> None:
    if part.state == "inactive":
        block.pool.add(block)
        if is_split:
            heap.count_split(block.pool, 1, block.size)
        return
    block.allocated = True
    block.requested = part.requested_bytes
    heap.live[block.address] = block
    for statistics in block.pool.statistics:
        statistics.count_allocation(block.size, part.requested_bytes)
