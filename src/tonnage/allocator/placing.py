"""Operations on a heap at recorded addresses: they restore its state and repeat a recording block by block."""

from collections.abc import Iterable
from itertools import islice

from tonnage.allocator.blocks import Block, Pool
from tonnage.allocator.caching import CachingAllocator
from tonnage.allocator.heap import Heap
from tonnage.allocator.segments import Segment, SegmentBlock
from tonnage.allocator.settings import SMALL_BYTES, SMALL_SEGMENT_BYTES
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
        head = place_segment(allocator.heap, segment.address, segment.size_bytes, segment.stream, pool)
        pool.remove(head)
        _split_into(allocator.heap, head, segment.blocks)
        for block in segment.blocks:
            if block.state == "active_pending_free":
                tickets[block.address] = allocator.free(block.address, held=True)
    allocator.events.clear()
    return tickets


def place_segment(heap: Heap, address: int, size: int, stream: int, pool: Pool | None = None) -> Block:
    """Add a segment that the real allocator obtained at this address; segments of 2 MiB are small ones."""
    if pool is None:
        pool = heap.small if size == SMALL_SEGMENT_BYTES else heap.large
    heap.driver.create(size)
    block = heap.add_segment(address, size, stream, pool)
    pool.add(block)
    return block


def place(heap: Heap, address: int, size_bytes: int, stream: int) -> None:
    """Allocate the block at this address, as the real allocator did.

    Raises CannotEstimate when no free block begins there.
    """
    size = heap.settings.round_size(size_bytes)
    pool = heap.small if size <= SMALL_BYTES else heap.large
    for block in islice(pool.free, pool.best_fit(stream, size), None):
        if block.address == address and block.stream == stream:
            pool.remove(block)
            heap.hand_out(block, size, size_bytes, expandable=block.range is not None)
            return
    raise CannotEstimate(
        f"The recording allocates {size_bytes} bytes at {address:#x}, where no free block of that size begins."
    )


def place_release(heap: Heap, address: int) -> None:
    """Give the segment at this address back to the driver, as the real allocator did."""
    for pool in (heap.small, heap.large):
        for block in pool.free:
            if block.address == address and not block.is_split:
                heap.release_segment(block)
                return
    raise CannotEstimate(f"The recording frees a segment at {address:#x}, where no free segment begins.")


def place_mapping(heap: Heap, address: int, size: int, stream: int) -> None:
    """Map memory at this address, as the real allocator did, in a known or a new expandable segment."""
    pool = heap.small if size == SMALL_SEGMENT_BYTES else heap.large
    known = [
        block
        for each in (heap.small, heap.large)
        for block in each.unmapped(stream)
        if block.address <= address < block.address + block.size
    ]
    block = known[0] if known else heap.add_range(pool, stream, address)
    if block.address != address or not heap.map(block, size):
        raise CannotEstimate(f"The recording maps {size} bytes at {address:#x}, where that is not possible.")


def place_unmapping(heap: Heap, address: int) -> None:
    """Unmap the pages at this address, as the real allocator did."""
    for pool in (heap.small, heap.large):
        for block in pool.free:
            if block.range is not None and block.range.pages_within(block)[0] == address:
                heap.unmap(block)
                return
    raise CannotEstimate(f"The recording unmaps memory at {address:#x}, where no free pages begin.")


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
