"""Segments, the blocks into which they are split, and the statistics of both.

The heap carries out operations and decides only where to split a block; the allocator (`caching`) chooses the block
that serves a request.
"""

from collections.abc import Iterator
from typing import Final

from tonnage.allocator.blocks import Block, Pool, PoolId, PrivatePool, Range
from tonnage.allocator.driver import Driver
from tonnage.allocator.segments import BlockState, Segment, SegmentBlock
from tonnage.allocator.settings import (
    MIN_BLOCK_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
    round_up,
    tie_rule,
    version_numbers,
)
from tonnage.allocator.statistics import Stat, Statistics
from tonnage.trace.trace import Event

COUNTERS: Final = (
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
    "num_oom_rejections",
)
"""Names of the plain counters of `torch.cuda.memory_stats`."""


class Heap:
    """Memory of one allocator: its pools, the blocks in use, events and statistics."""

    def __init__(self, driver: Driver, settings: AllocatorSettings, torch_version: str) -> None:
        self.driver = driver
        self.settings = settings
        self.version = version_numbers(torch_version)
        self.events: list[Event] = []
        self.mark = 0
        self.reserved_bytes = 0
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.all, small, large = Statistics(), Statistics(), Statistics()
        self.small = Pool(is_small=True, statistics=(self.all, small))
        self.large = Pool(is_small=False, statistics=(self.all, large))
        self.private: dict[PoolId, PrivatePool] = {}
        self.live: dict[int, Block] = {}
        """Allocated blocks by address."""
        self.waiting: set[Block] = set()
        """Freed blocks that other streams may still use."""
        self._statistics = {"all": self.all, "small_pool": small, "large_pool": large}
        self._reserved_by_pool: dict[PoolId, dict[str, Stat]] = {}
        self._oversize_allocations, self._oversize_segments = Stat(), Stat()
        self._reported_split_bytes = settings.max_split_bytes
        self._tie = tie_rule(torch_version)
        self._orders = 0

    def add_private_pool(self, pool: PoolId) -> PrivatePool:
        """Create private pools with this id."""
        small, large = self._statistics["small_pool"], self._statistics["large_pool"]
        self.private[pool] = PrivatePool(pool, self.all, small, large)
        return self.private[pool]

    def note(self, action: str, address: int, size_bytes: int, stream: int) -> None:
        """Record an event."""
        self.events.append(Event(action, address, size_bytes, stream, self.mark))

    # --- segments ---------------------------------------------------------------------------------------------

    def add_segment(self, address: int, size: int, stream: int, pool: Pool) -> Block:
        """Return a block that is a whole new segment, obtained from the driver; it is in no pool yet."""
        self._reserve(pool, size)
        for statistics in pool.statistics:
            statistics.segment.increase(1)
        if self._is_oversize(size):
            self._oversize_segments.increase(1)
        self.note("segment_alloc", address, size, stream)
        return Block(address, size, stream, pool, self._next_order(None))

    def release_segment(self, block: Block) -> None:
        """Give a free block, which must be a whole segment, back to the driver."""
        pool, size = block.pool, block.size
        self.counters["num_device_free"] += 1
        self.note("segment_free", block.address, size, block.stream)
        self.driver.free(block.address, size)
        for statistics in pool.statistics:
            statistics.segment.decrease(1)
        self._unreserve(pool, size)
        if self._is_oversize(size):
            self._oversize_segments.decrease(1)
        pool.remove(block)

    # --- blocks -----------------------------------------------------------------------------------------------

    def hand_out(self, block: Block, size: int, requested_bytes: int, *, expandable: bool) -> int:
        """Allocate the first `size` bytes of a free block that is in no pool, or all of it; return the address."""
        was_split = block.is_split
        counts_splits = block.range is None  # free parts of expandable segments do not count as inactive splits
        pool = block.pool
        if self._should_split(block, size, expandable):
            rest = block
            block = self.split_front(rest, size)
            pool.add(rest)
            if counts_splits and was_split:
                self.count_split(pool, 0, -block.size)
            elif counts_splits:
                self.count_split(pool, 1, rest.size)
        elif counts_splits and was_split:
            self.count_split(pool, -1, -block.size)
        block.allocated = True
        block.requested = requested_bytes
        self.live[block.address] = block
        self.note("alloc", block.address, requested_bytes, block.stream)
        for statistics in pool.statistics:
            statistics.count_allocation(block.size, requested_bytes)
        if self._is_oversize(block.size):
            self._oversize_allocations.increase(1)
        return block.address

    def take_back(self, address: int) -> Block:
        """Return the block that the program frees; it is not free yet.  Raises ValueError for an unknown address."""
        block = self.live.pop(address, None)
        if block is None:
            raise ValueError(f"{address:#x} is not the address of an allocated block.")
        block.allocated = False
        for statistics in block.pool.statistics:
            statistics.count_free_request(block.size)
        self.note("free_requested", address, block.requested, block.stream)
        if self._is_oversize(block.size):
            self._oversize_allocations.decrease(1)
        return block

    def free(self, block: Block) -> None:
        """Merge a block that no stream uses any more with its free neighbours, and add it to its pool."""
        self.note("free_completed", block.address, block.requested, block.stream)
        size = block.size
        splits = split_bytes = 0
        for neighbour in (block.previous, block.next):
            merged = self._merge(block, neighbour)
            if merged:
                splits -= 1
                split_bytes -= merged
        block.pool.add(block)
        if block.is_split:
            splits += 1
            split_bytes += block.size
        if block.range is None:
            self.count_split(block.pool, splits, split_bytes)
        for statistics in block.pool.statistics:
            statistics.count_free(size, block.requested)

    def split_front(self, rest: Block, size: int) -> Block:
        """Split the first `size` bytes off a block and return them as a new block in front of the rest."""
        front = Block(rest.address, size, rest.stream, rest.pool, self._next_order(rest), rest.range)
        front.insert_before(rest)
        rest.address += size
        rest.size -= size
        return front

    def count_split(self, pool: Pool, blocks: int, size_bytes: int) -> None:
        """Add to the number and the bytes of the free parts of split segments."""
        for statistics in pool.statistics:
            statistics.count_split_change(blocks, size_bytes)

    def _should_split(self, block: Block, size: int, expandable: bool) -> bool:
        if block.pool.owner is not None and not block.pool.owner.splits:
            return False
        rest = block.size - size
        if block.pool.is_small or expandable:
            return rest >= MIN_BLOCK_BYTES
        limit = self.settings.max_split_bytes
        return (limit is None or size < limit) and rest > SMALL_BYTES

    def _merge(self, block: Block, neighbour: Block | None) -> int:
        """Merge a neighbour into `block` and return its bytes; 0 if it is in use, or only one of them has memory."""
        if neighbour is None or not neighbour.is_free or block.mapped != neighbour.mapped:
            return 0
        if neighbour.mapped:
            neighbour.pool.remove(neighbour)
        else:
            neighbour.pool.remove_unmapped(neighbour)
        block.absorb(neighbour)
        return neighbour.size

    # --- expandable segments ----------------------------------------------------------------------------------

    def add_range(self, pool: Pool, stream: int, address: int | None = None) -> Block:
        """Return an unmapped block with a new range of addresses: 9/8 of the device's memory, in whole pages."""
        page = SMALL_SEGMENT_BYTES if pool.is_small else self.settings.large_segment_bytes
        size = round_up(self.driver.total_bytes + self.driver.total_bytes // 8, page)
        addresses = Range(self.driver.reserve(size) if address is None else address, size, page)
        block = Block(addresses.address, size, stream, pool, self._next_order(None), addresses)
        block.mapped = False
        pool.add_unmapped(block)
        return block

    def map(self, block: Block, size: int) -> bool:
        """Map memory to the first `size` bytes of an unmapped block, in whole pages; return False without memory."""
        assert block.range is not None
        mapped = block.range.pages_for(block, size)
        if not self.driver.create(mapped):
            return False
        pool, address = block.pool, block.address
        pool.remove_unmapped(block)
        block.mapped = True
        if mapped < block.size:
            rest_size = block.size - mapped
            rest = Block(address + mapped, rest_size, block.stream, pool, self._next_order(block), block.range)
            rest.mapped = False
            rest.insert_after(block)
            pool.add_unmapped(rest)
            block.size = mapped
        self._merge(block, block.previous)
        self._merge(block, block.next)
        pool.add(block)
        self._reserve(pool, mapped)
        self.note("segment_map", address, mapped, block.stream)
        return True

    def unmap(self, block: Block) -> None:
        """Give back the pages that lie completely inside a free block."""
        assert block.range is not None
        address, size = block.range.pages_within(block)
        if size == 0:
            return
        pool = block.pool
        self.driver.release(size)
        pool.remove(block)
        before = address - block.address
        after = block.size - before - size
        if before:
            part = Block(block.address, before, block.stream, pool, self._next_order(block), block.range)
            part.insert_before(block)
            pool.add(part)
        if after:
            part = Block(address + size, after, block.stream, pool, self._next_order(block), block.range)
            part.insert_after(block)
            pool.add(part)
        block.address, block.size, block.mapped = address, size, False
        self._merge(block, block.previous)
        self._merge(block, block.next)
        pool.add_unmapped(block)
        self._unreserve(pool, size)
        self.counters["num_device_free"] += 1
        self.note("segment_unmap", address, size, block.stream)

    # --- statistics -------------------------------------------------------------------------------------------

    def memory_stats(self) -> dict[str, int]:
        """Return the numbers of `torch.cuda.memory_stats`, with its names."""
        numbers: dict[str, int] = {}
        for pool, statistics in self._statistics.items():
            for name, stat in statistics.items():
                numbers.update(stat.items(f"{name}.{pool}"))
        numbers.update(self._oversize_allocations.items("oversize_allocations"))
        numbers.update(self._oversize_segments.items("oversize_segments"))
        numbers.update(self.counters)
        if self.version < (2, 12):
            del numbers["num_oom_rejections"]
        numbers["max_split_size"] = -1 if self._reported_split_bytes is None else self._reported_split_bytes
        if self.version >= (2, 13):
            for pool_id, reserved in self._reserved_by_pool.items():
                for pool, stat in reserved.items():
                    name = "_".join(map(str, pool_id))
                    numbers.update(stat.items(f"reserved_bytes_by_private_pools.{name}.{pool}"))
        return numbers

    def reset_peak_memory_stats(self) -> None:
        """Set all peaks to the current values."""
        for stat in self._iterate_stats():
            stat.reset_peak()

    def reset_accumulated_memory_stats(self) -> None:
        """Set the sums of all increases and decreases and the counters to zero."""
        for stat in self._iterate_stats():
            stat.reset_accumulated()
        self.counters = dict.fromkeys(COUNTERS, 0)

    def segments(self) -> tuple[Segment, ...]:
        """Return all segments by address."""
        blocks = self._iterate_mapped_blocks()
        heads = [block for block in blocks if block.previous is None or not block.previous.mapped]
        return tuple(_make_segment(head) for head in sorted(heads, key=lambda block: block.address))

    def _next_order(self, parent: Block | None) -> int:
        if self._tie == "address":
            return 0
        if self._tie == "segment" and parent is not None:
            return parent.order
        self._orders += 1
        return self._orders

    def _is_oversize(self, size: int) -> bool:
        return self.settings.max_split_bytes is not None and size >= self.settings.max_split_bytes

    def _reserve(self, pool: Pool, size: int) -> None:
        self.reserved_bytes += size
        self.counters["num_device_alloc"] += 1
        for stat in pool.reserved:
            stat.increase(size)
        if pool.owner is not None:
            self._reserved_by_pool[pool.owner.id] = pool.owner.reserved_bytes

    def _unreserve(self, pool: Pool, size: int) -> None:
        self.reserved_bytes -= size
        for stat in pool.reserved:
            stat.decrease(size)

    def _iterate_stats(self) -> Iterator[Stat]:
        for statistics in self._statistics.values():
            yield from statistics
        for reserved in self._reserved_by_pool.values():
            yield from reserved.values()
        yield from (self._oversize_allocations, self._oversize_segments)

    def _iterate_mapped_blocks(self) -> Iterator[Block]:
        pools = [self.small, self.large]
        for private in self.private.values():
            pools += (private.small, private.large)
        for pool in pools:
            yield from pool.free
        yield from self.live.values()
        yield from self.waiting


def _make_segment(head: Block) -> Segment:
    blocks = []
    block: Block | None = head
    while block is not None and block.mapped:
        state: BlockState = "inactive"
        if block.allocated:
            state = "active_allocated"
        elif not block.is_free:
            state = "active_pending_free"
        blocks.append(SegmentBlock(block.address, block.size, block.requested, state))
        block = block.next
    return Segment(
        address=head.address,
        stream=head.stream,
        is_small=head.pool.is_small,
        is_expandable=head.range is not None,
        pool=head.pool.id,
        blocks=tuple(blocks),
    )
