"""A replica of PyTorch's CUDACachingAllocator: the same decisions, events and statistics, without a GPU.

The rules are in `docs/allocator.md`; `tests/test_allocator_against_torch.py` compares every event and statistic with
the allocator inside torch.  One object is the allocator of one device.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

from tonnage.allocator.blocks import DEFAULT_POOL, Block, Pool, PoolId, PrivatePool, Range
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
from tonnage.errors import CannotEstimate
from tonnage.trace import Event
from tonnage.units import size as in_units

NEWEST: Final = "2.13"
"""The newest torch whose rules were compared; later ones are taken to behave like it."""

COUNTERS: Final = (
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
    "num_oom_rejections",
)
"""The plain counters of `torch.cuda.memory_stats`."""


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """What was missing when a request could not be served."""

    requested_bytes: int
    """The request, rounded as a block."""
    segment_bytes: int
    """The segment that the driver would have had to give; the size that torch's own message names."""
    allocated_bytes: int
    """Handed out to the program at that moment."""
    reserved_bytes: int
    """Held by the allocator at that moment, after it gave back what it could."""
    free_bytes: int
    """Free on the device at that moment."""
    total_bytes: int
    """The device's memory as the driver reports it."""
    mark: int
    """The mark of the event that asked (see trace.Event)."""


class OutOfMemory(Exception):
    """A request could not be served, even after cached memory was given back."""

    def __init__(self, shortage: Shortage) -> None:
        self.shortage = shortage
        unallocated = shortage.reserved_bytes - shortage.allocated_bytes
        super().__init__(
            f"Out of memory: a segment of {in_units(shortage.segment_bytes)} was needed and "
            f"{in_units(shortage.free_bytes)} of {in_units(shortage.total_bytes)} were free; "
            f"{in_units(shortage.allocated_bytes)} are allocated, {in_units(unallocated)} more are reserved."
        )


class _Request(NamedTuple):
    size: int
    stream: int
    pool: Pool
    segment_bytes: int
    expandable: bool


class _Use(NamedTuple):
    pool: PoolId
    streams: frozenset[int] | None
    capturing: bool


class CachingAllocator:
    """The caching allocator of one device.

    Memory comes from `driver`.  `events` grows with every decision, in torch's words; each event carries `mark`,
    which the caller may set.  Work of other streams (`record_stream`) is finished at once or, with `lazy=True`,
    when `synchronise` says so: the two bounds of what a real GPU does.
    """

    def __init__(
        self,
        driver: Driver,
        settings: AllocatorSettings | None = None,
        *,
        torch_version: str = NEWEST,
        lazy: bool = False,
    ) -> None:
        self.driver = driver
        self.settings = settings or AllocatorSettings()
        self.events: list[Event] = []
        self.mark = 0
        self.reserved_bytes = 0
        self.counters = dict.fromkeys(COUNTERS, 0)

        self._version = version_numbers(torch_version)
        self._tie = tie_rule(torch_version)
        self._orders = 0
        self._all, small, large = Statistics(), Statistics(), Statistics()
        self._statistics = {"all": self._all, "small_pool": small, "large_pool": large}
        self._oversize_allocations, self._oversize_segments = Stat(), Stat()
        self._reported_split_bytes = self.settings.max_split_bytes
        self._small = Pool(is_small=True, statistics=(self._all, small))
        self._large = Pool(is_small=False, statistics=(self._all, large))
        self._allowed_bytes: int | None = None
        self.set_memory_fraction(self.settings.per_process_memory_fraction)

        self._live: dict[int, Block] = {}
        self._held: dict[int, Block] = {}
        self._waiting: dict[int, deque[tuple[int, Block]]] = {}
        self._lazy = lazy
        self._tickets = 0
        self._finished_everywhere = 0
        self._finished: dict[int, int] = {}

        self._private: dict[PoolId, PrivatePool] = {}
        self._reserved_by_pool: dict[PoolId, dict[str, Stat]] = {}
        self._uses: list[_Use] = []
        self._deferred: dict[Block, None] = {}
        self._uses_in_capture: dict[Block, set[int]] = {}

    # --- what a program asks ----------------------------------------------------------------------------------

    def malloc(self, size_bytes: int, stream: int = 0) -> int:
        """The address of a block for `size_bytes` (at least 1).  Raises OutOfMemory."""
        if size_bytes < 1:
            raise ValueError(f"{size_bytes} bytes requested; torch asks its allocator for at least 1.")
        if not self._is_capturing(stream):
            self._process_events()
        request = self._request(size_bytes, stream)
        block = self._search(request)
        if block is None:
            self._collect_garbage()
            block = self._obtain(request)
        if block is None:
            block, request = self._last_resorts(request)
        if block is None:
            raise self._shortage(request)
        return self._hand_out(block, request, size_bytes)

    def free(self, address: int, *, held: bool = False) -> int:
        """The program is done with a block; other streams on which it was used may not be.

        With `held`, the caller decides when those are: at `complete` of the returned ticket, or before, when all
        streams are waited for.
        """
        block = self._live.pop(address, None)
        if block is None:
            raise ValueError(f"{address:#x} is not the address of a block that is handed out.")
        block.allocated = False
        for statistics in block.pool.statistics:
            statistics.given_back(block.size)
        self._note("free_requested", address, block.requested, block.stream)
        if self._is_oversize(block.size):
            self._oversize_allocations.decrease(1)
        if held:
            block.events = 1
            self._tickets += 1
            self._held[self._tickets] = block
        elif not block.uses:
            self._free(block)
        elif self._is_capturing(block.stream, *block.uses):
            self._deferred[block] = None
        else:
            self._insert_events(block)
        return self._tickets

    def complete(self, ticket: int) -> bool:
        """Other streams are done with a block freed as `held`; False when it is no longer waited for."""
        block = self._held.pop(ticket, None)
        if block is None:
            return False
        self._event_finished(block)
        return True

    def record_stream(self, address: int, stream: int) -> None:
        """The program used a block on another stream."""
        block = self._live[address]
        if stream == block.stream:
            return
        block.uses.add(stream)
        if self._is_capturing(block.stream, stream):
            self._uses_in_capture.setdefault(block, set()).add(stream)

    def synchronise(self, stream: int | None = None) -> None:
        """All work so far, on one stream or on all, has finished (matters to a lazy allocator)."""
        if stream is None:
            self._finished_everywhere = self._tickets
        else:
            self._finished[stream] = self._tickets

    def empty_cache(self, pool: PoolId = DEFAULT_POOL) -> None:
        """Give every segment without a used block back to the driver."""
        self._release_cached(pool)

    def set_memory_fraction(self, fraction: float) -> None:
        """Limit what may be reserved to this fraction of the device; 1.0 lifts the limit."""
        self._allowed_bytes = None if fraction >= 1.0 else int(fraction * self.driver.total_bytes)

    # --- private pools ----------------------------------------------------------------------------------------

    def create_pool(self, pool: PoolId, *, splits: bool = True, use_on_oom: bool = False) -> None:
        """Make a private pool, or hold an existing one once more."""
        if pool in self._private:
            self._private[pool].users += 1
            return
        private = PrivatePool(pool, self._all, self._statistics["small_pool"], self._statistics["large_pool"])
        private.splits, private.use_on_oom = splits, use_on_oom
        self._private[pool] = private

    def begin_pool(self, pool: PoolId, *, streams: Iterable[int] | None = None, capturing: bool = False) -> None:
        """From now on serve requests (on these streams; None: all) from a private pool.

        For a stream that is `capturing` a graph, events may not be asked whether they are finished, nor memory given
        back; up to torch 2.12 the same holds for all streams while any private pool is in use.
        """
        if any(pool == use.pool for use in self._uses):
            raise ValueError(f"Pool {pool} is in use already.")
        self.create_pool(pool)
        self._uses.append(_Use(pool, None if streams is None else frozenset(streams), capturing))

    def end_pool(self, pool: PoolId) -> None:
        """Stop serving requests from a private pool; it keeps its memory until released."""
        remaining = [use for use in self._uses if use.pool != pool]
        if len(remaining) == len(self._uses):
            raise ValueError(f"Pool {pool} is not in use.")
        self._uses = remaining

    def release_pool(self, pool: PoolId) -> None:
        """Hold a private pool once less; without holders its free segments can be given back."""
        self._private[pool].users -= 1

    # --- what a caller reads ----------------------------------------------------------------------------------

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the blocks that the program holds."""
        return self._all.allocated_bytes.current

    @property
    def peak_allocated_bytes(self) -> int:
        """The highest `allocated_bytes` since the start or the last reset."""
        return self._all.allocated_bytes.peak

    @property
    def peak_reserved_bytes(self) -> int:
        """The highest `reserved_bytes` since the start or the last reset."""
        return self._all.reserved_bytes.peak

    def block_size(self, address: int) -> int:
        """Bytes of the handed-out block at `address`: the request, rounded, and the slack of a block not split."""
        return self._live[address].size

    def memory_stats(self) -> dict[str, int]:
        """The numbers of `torch.cuda.memory_stats`, under its names."""
        numbers: dict[str, int] = {}
        for pool, statistics in self._statistics.items():
            for name, stat in statistics.items():
                numbers.update(stat.items(f"{name}.{pool}"))
        numbers.update(self._oversize_allocations.items("oversize_allocations"))
        numbers.update(self._oversize_segments.items("oversize_segments"))
        numbers.update(self.counters)
        if self._version < (2, 12):
            del numbers["num_oom_rejections"]
        numbers["max_split_size"] = -1 if self._reported_split_bytes is None else self._reported_split_bytes
        if self._version >= (2, 13):
            for pool_id, reserved in self._reserved_by_pool.items():
                for pool, stat in reserved.items():
                    name = "_".join(map(str, pool_id))
                    numbers.update(stat.items(f"reserved_bytes_by_private_pools.{name}.{pool}"))
        return numbers

    def reset_peak_memory_stats(self) -> None:
        """Let every peak be the present value."""
        for stat in self._every_stat():
            stat.reset_peak()

    def reset_accumulated_memory_stats(self) -> None:
        """Forget what was ever added and taken away, and the counters."""
        for stat in self._every_stat():
            stat.reset_accumulated()
        self.counters = dict.fromkeys(COUNTERS, 0)

    def segments(self) -> tuple[Segment, ...]:
        """Everything held from the driver, by address."""
        heads = [block for block in self._every_mapped_block() if block.previous is None or not block.previous.mapped]
        return tuple(_segment(head) for head in sorted(heads, key=lambda block: block.address))

    # --- placing by hand --------------------------------------------------------------------------------------

    def restore(self, segments: Iterable[Segment]) -> dict[int, int]:
        """Hold these segments, obtained in this order, before the program's first request.

        Returns, by address, the tickets of blocks that await other streams (see `complete`).  Raises CannotEstimate
        for expandable segments: what addresses they reserve is not known.
        """
        tickets: dict[int, int] = {}
        for segment in segments:
            if segment.is_expandable:
                raise CannotEstimate(
                    "An expandable segment cannot be restored, because the addresses it reserved are not known; "
                    "record from the start of the program."
                )
            pool = self._small if segment.is_small else self._large
            head = self.place_segment(segment.address, segment.size_bytes, segment.stream, pool)
            pool.remove(head)
            self._divide(head, segment.blocks)
            for block in segment.blocks:
                if block.state == "active_pending_free":
                    tickets[block.address] = self.free(block.address, held=True)
        self.events.clear()
        return tickets

    def place_segment(self, address: int, size: int, stream: int, pool: Pool | None = None) -> Block:
        """A segment that the real allocator obtained there; small ones are those of 2 MiB."""
        if pool is None:
            pool = self._small if size == SMALL_SEGMENT_BYTES else self._large
        self.driver.create(size)
        block = self._segment_obtained(address, size, stream, pool)
        pool.add(block)
        return block

    def place(self, address: int, size_bytes: int, stream: int) -> None:
        """A request that the real allocator served there.  Raises CannotEstimate when no free block begins there."""
        request = self._request(size_bytes, stream)
        for block in islice(request.pool.free, request.pool.best_fit(stream, request.size), None):
            if block.address == address and block.stream == stream:
                request.pool.remove(block)
                self._hand_out(block, request._replace(expandable=block.range is not None), size_bytes)
                return
        raise CannotEstimate(
            f"The recording hands out {size_bytes} bytes at {address:#x}, where no free block of that size begins."
        )

    def place_release(self, address: int) -> None:
        """A segment that the real allocator gave back."""
        for pool in (self._small, self._large):
            for block in pool.free:
                if block.address == address and not block.is_split:
                    self._release_segment(block)
                    return
        raise CannotEstimate(f"The recording gives back a segment at {address:#x}, where no free segment begins.")

    def place_mapping(self, address: int, size: int, stream: int) -> None:
        """Memory that the real allocator mapped there, in an expandable segment known or new."""
        pool = self._small if size == SMALL_SEGMENT_BYTES else self._large
        known = [
            block
            for each in (self._small, self._large)
            for block in each.unmapped(stream)
            if block.address <= address < block.address + block.size
        ]
        block = known[0] if known else self._new_range(pool, stream, address)
        if block.address != address or not self._map(block, size):
            raise CannotEstimate(f"The recording maps {size} bytes at {address:#x}, where that is not possible.")

    def place_unmapping(self, address: int) -> None:
        """Memory of an expandable segment that the real allocator gave back."""
        for pool in (self._small, self._large):
            for block in pool.free:
                if block.range is not None and block.range.pages_within(block)[0] == address:
                    self._unmap(block)
                    return
        raise CannotEstimate(f"The recording unmaps memory at {address:#x}, where no free pages begin.")

    def _divide(self, rest: Block, parts: tuple[SegmentBlock, ...]) -> None:
        """Cut a new segment into blocks; the last part keeps the Block object that the segment came with."""
        pool = rest.pool
        is_split = len(parts) > 1
        for part in parts[:-1]:
            front = self._split_front(rest, part.size_bytes)
            pool.remove(rest)
            self._set_state(front, part, is_split)
        self._set_state(rest, parts[-1], is_split)

    def _set_state(self, block: Block, part: SegmentBlock, is_split: bool) -> None:
        if part.state == "inactive":
            block.pool.add(block)
            if is_split:
                self._count_split(block.pool, 1, block.size)
            return
        block.allocated = True
        block.requested = part.requested_bytes
        self._live[block.address] = block
        for statistics in block.pool.statistics:
            statistics.handed_out(block.size, part.requested_bytes)

    # --- finding a block --------------------------------------------------------------------------------------

    def _request(self, size_bytes: int, stream: int) -> _Request:
        size = self.settings.round_size(size_bytes)
        owner = self._private_pool_for(stream)
        if size <= SMALL_BYTES:
            pool = self._small if owner is None else owner.small
        else:
            pool = self._large if owner is None else owner.large
        segment_bytes = self.settings.segment_size(size)
        return _Request(size, stream, pool, segment_bytes, self.settings.expandable_segments)

    def _private_pool_for(self, stream: int) -> PrivatePool | None:
        for use in reversed(self._uses):
            if use.streams is None or stream in use.streams:
                return self._private[use.pool]
        return None

    def _is_capturing(self, *streams: int) -> bool:
        if self._version < (2, 13):
            return bool(self._uses)
        return any(
            use.capturing and (use.streams is None or not use.streams.isdisjoint(streams)) for use in self._uses
        )

    def _search(self, request: _Request) -> Block | None:
        """The best fitting free block, taken out of its pool."""
        pool = request.pool
        if self._collects_garbage:
            pool.searches += 1
        position = pool.best_fit(request.stream, request.size)
        free = pool.free
        if position == len(free) or free[position].stream != request.stream:
            return None
        block = free[position]
        if block.range is not None:
            found = (_closest_to_full if request.expandable else _not_expandable)(free, position)
            if found is None:
                return None
            block = found
        if not self._may_serve(block, request.size):
            return None
        pool.remove(block)
        return block

    def _may_serve(self, block: Block, size: int) -> bool:
        limit = self.settings.max_split_bytes
        if limit is None:
            return True
        if size < limit:
            return block.size < limit
        return block.size < size + self.settings.max_non_split_rounding_bytes

    def _obtain(self, request: _Request) -> Block | None:
        """A new block from the driver; None when it, or the fraction, does not allow it."""
        wanted = self.reserved_bytes + request.segment_bytes
        if self._allowed_bytes is not None and wanted > self._allowed_bytes:
            return None
        if self.settings.throw_on_cudamalloc_oom:
            self._reject_above_fraction(request, wanted)
        block = self._expand(request) if request.expandable else self._new_segment(request)
        if block is not None and request.pool.owner is not None:
            request.pool.owner.segments += 1
        return block

    def _reject_above_fraction(self, request: _Request, wanted_bytes: int) -> None:
        if wanted_bytes > int(self.settings.per_process_memory_fraction * self.driver.total_bytes):
            self.counters["num_oom_rejections"] += 1
            raise OutOfMemory(self._describe_shortage(request))

    def _new_segment(self, request: _Request) -> Block | None:
        address = self.driver.malloc(request.segment_bytes)
        if address is None:
            return None
        return self._segment_obtained(address, request.segment_bytes, request.stream, request.pool)

    def _segment_obtained(self, address: int, size: int, stream: int, pool: Pool) -> Block:
        self._reserve(pool, size)
        for statistics in pool.statistics:
            statistics.segment.increase(1)
        if self._is_oversize(size):
            self._oversize_segments.increase(1)
        self._note("segment_alloc", address, size, stream)
        return Block(address, size, stream, pool, self._next_order(None))

    def _last_resorts(self, request: _Request) -> tuple[Block | None, _Request]:
        """Pools lent for this moment; then giving back large cached blocks; then all of them."""
        if request.pool.owner is None:
            for private in self._private.values():
                if private.use_on_oom:
                    pool = private.small if request.pool.is_small else private.large
                    lent = request._replace(pool=pool, expandable=False)
                    block = self._search(lent)
                    if block is not None:
                        return block, lent
        if self._release_oversize(request):
            block = self._obtain(request)
            if block is not None:
                return block, request
        if self._is_capturing(request.stream):
            return None, request
        self._release_cached(DEFAULT_POOL)
        self.counters["num_alloc_retries"] += 1
        return self._obtain(request), request

    def _shortage(self, request: _Request) -> OutOfMemory:
        self._note("oom", self.driver.free_bytes, request.size, request.stream)
        self.counters["num_ooms"] += 1
        return OutOfMemory(self._describe_shortage(request))

    def _describe_shortage(self, request: _Request) -> Shortage:
        return Shortage(
            requested_bytes=request.size,
            segment_bytes=request.segment_bytes,
            allocated_bytes=self.allocated_bytes,
            reserved_bytes=self.reserved_bytes,
            free_bytes=self.driver.free_bytes,
            total_bytes=self.driver.total_bytes,
            mark=self.mark,
        )

    # --- handing out and taking back --------------------------------------------------------------------------

    def _hand_out(self, block: Block, request: _Request, requested_bytes: int) -> int:
        was_split = block.is_split
        counted = block.range is None  # free parts of expandable segments are not called inactive splits
        pool = block.pool
        if self._should_split(block, request):
            rest = block
            block = self._split_front(rest, request.size)
            if counted and was_split:
                self._count_split(pool, 0, -block.size)
            elif counted:
                self._count_split(pool, 1, rest.size)
        elif counted and was_split:
            self._count_split(pool, -1, -block.size)
        block.allocated = True
        block.requested = requested_bytes
        self._live[block.address] = block
        self._note("alloc", block.address, requested_bytes, block.stream)
        for statistics in pool.statistics:
            statistics.handed_out(block.size, requested_bytes)
        if self._is_oversize(block.size):
            self._oversize_allocations.increase(1)
        return block.address

    def _should_split(self, block: Block, request: _Request) -> bool:
        if block.pool.owner is not None and not block.pool.owner.splits:
            return False
        rest = block.size - request.size
        if block.pool.is_small or request.expandable:
            return rest >= MIN_BLOCK_BYTES
        limit = self.settings.max_split_bytes
        return (limit is None or request.size < limit) and rest > SMALL_BYTES

    def _split_front(self, rest: Block, size: int) -> Block:
        """The first `size` bytes as a block of their own; the rest goes into the pool."""
        front = Block(rest.address, size, rest.stream, rest.pool, self._next_order(rest), rest.range)
        front.insert_before(rest)
        rest.address += size
        rest.size -= size
        rest.pool.add(rest)
        return front

    def _free(self, block: Block) -> None:
        """Merge a block that nobody uses with its free neighbours and put it into its pool."""
        self._note("free_completed", block.address, block.requested, block.stream)
        size = block.size
        splits = split_bytes = 0
        for neighbour in (block.previous, block.next):
            subsumed = self._merge(block, neighbour)
            if subsumed:
                splits -= 1
                split_bytes -= subsumed
        block.pool.add(block)
        if block.is_split:
            splits += 1
            split_bytes += block.size
        if block.range is None:
            self._count_split(block.pool, splits, split_bytes)
        for statistics in block.pool.statistics:
            statistics.became_free(size, block.requested)

    def _merge(self, block: Block, neighbour: Block | None) -> int:
        """Bytes that `block` took over from a neighbour; 0 when that is in use, or only one of them has memory."""
        if neighbour is None or not neighbour.is_free or block.mapped != neighbour.mapped:
            return 0
        if neighbour.mapped:
            neighbour.pool.remove(neighbour)
        else:
            neighbour.pool.remove_unmapped(neighbour)
        block.absorb(neighbour)
        return neighbour.size

    # --- other streams ----------------------------------------------------------------------------------------

    def _insert_events(self, block: Block) -> None:
        streams, block.uses = block.uses, set()
        self._tickets += 1
        for stream in streams:
            block.events += 1
            self._waiting.setdefault(stream, deque()).append((self._tickets, block))

    def _event_finished(self, block: Block) -> None:
        block.events -= 1
        if block.events == 0:
            self._free(block)

    def _process_events(self) -> None:
        """Free the blocks of finished events, stopping at the first unfinished one of each stream."""
        if self._deferred:
            self._insert_deferred_events()
        if not self._waiting:
            return
        for stream in list(self._waiting):
            queue = self._waiting[stream]
            while queue and self._is_finished(stream, queue[0][0]):
                self._event_finished(queue.popleft()[1])
            if not queue:
                del self._waiting[stream]

    def _is_finished(self, stream: int, ticket: int) -> bool:
        return not self._lazy or ticket <= max(self._finished_everywhere, self._finished.get(stream, 0))

    def _wait_for_events(self, private: PrivatePool | None = None) -> None:
        """Wait for all streams (for the blocks of one private pool, or for all) and free what waited for them."""
        self.counters["num_sync_all_streams"] += 1
        self._insert_deferred_events()
        for stream in list(self._waiting):
            remaining: deque[tuple[int, Block]] = deque()
            for ticket, block in self._waiting[stream]:
                if private is None or block.pool.owner is private:
                    self._event_finished(block)
                else:
                    remaining.append((ticket, block))
            if remaining:
                self._waiting[stream] = remaining
            else:
                del self._waiting[stream]
        for ticket, block in list(self._held.items()):
            if private is None or block.pool.owner is private:
                self.complete(ticket)

    def _insert_deferred_events(self) -> None:
        """Blocks freed during a capture: only streams recorded before it still have to be waited for."""
        deferred, self._deferred = self._deferred, {}
        for block in deferred:
            block.uses -= self._uses_in_capture.pop(block, set())
            self._insert_events(block)
            if block.events == 0:
                self._free(block)

    # --- giving memory back -----------------------------------------------------------------------------------

    @property
    def _collects_garbage(self) -> bool:
        return self._allowed_bytes is not None and self.settings.garbage_collection_threshold is not None

    def _collect_garbage(self) -> None:
        """Give back the oldest unsplit large blocks when the reserved memory is above the threshold."""
        if self._allowed_bytes is None or self.settings.garbage_collection_threshold is None:
            return
        target = self.reserved_bytes - int(self.settings.garbage_collection_threshold * self._allowed_bytes)
        pool = self._large
        ages = {block: pool.searches - block.searches for block in pool.free if not block.is_split}
        reclaimed = 0
        progress = True
        while reclaimed < target and progress and ages:
            oldest = sum(ages.values()) / len(ages)
            old = [block for block, age in ages.items() if block.range is None and age >= oldest]
            progress = bool(old)
            for block in old:
                reclaimed += block.size
                del ages[block]
                self._release_segment(block)

    def _release_oversize(self, request: _Request) -> bool:
        """Give back one block that is large enough, or several that may not be split; False when not enough."""
        limit = self.settings.max_split_bytes
        if limit is None:
            return False
        free = request.pool.free
        wanted = max(request.size, limit)
        position = request.pool.best_fit(request.stream, wanted)
        if position < len(free) and free[position].stream == request.stream and free[position].range is None:
            self._release_segment(free[position])
            return True
        released = 0
        for block in reversed(free[:position]):
            if released >= wanted or block.size < limit or block.stream != request.stream:
                break
            if block.range is None:
                released += block.size
                self._release_segment(block)
        return released >= wanted

    def _release_cached(self, pool: PoolId) -> None:
        if pool == DEFAULT_POOL and not self._is_capturing():
            self._wait_for_events()
            self._release_free(self._large)
            self._release_free(self._small)
        for private in [private for private in self._private.values() if private.users == 0]:
            if pool not in (DEFAULT_POOL, private.id):
                continue
            if pool == private.id:
                self._wait_for_events(private)
            self._release_free(private.small)
            self._release_free(private.large)
            if private.segments == 0:
                del self._private[private.id]

    def _release_free(self, pool: Pool) -> None:
        expandable = [block for block in pool.free if block.range is not None]
        for block in pool.free.copy():
            if block.range is None and not block.is_split:
                self._release_segment(block)
        for block in expandable:
            self._unmap(block)
            if not block.is_split:
                pool.remove_unmapped(block)

    def _release_segment(self, block: Block) -> None:
        pool, size = block.pool, block.size
        self.counters["num_device_free"] += 1
        self._note("segment_free", block.address, size, block.stream)
        self.driver.free(block.address, size)
        for statistics in pool.statistics:
            statistics.segment.decrease(1)
        self._unreserve(pool, size)
        if pool.owner is not None:
            pool.owner.segments -= 1
        if self._is_oversize(size):
            self._oversize_segments.decrease(1)
        pool.remove(block)

    # --- expandable segments ----------------------------------------------------------------------------------

    def _expand(self, request: _Request) -> Block | None:
        """A block made by mapping memory behind a free block, or to unmapped addresses, at the lowest that fit.

        When memory runs out half way, what was mapped stays as a free block.
        """
        block = self._room(request)
        if not block.mapped and not self._map(block, min(block.size, request.size)):
            return None
        while block.size < request.size:
            following = block.next
            assert following is not None  # _room saw enough addresses
            if not self._map(following, min(request.size - block.size, following.size)):
                return None
            block = following
        request.pool.remove(block)
        return block

    def _room(self, request: _Request) -> Block:
        for block in request.pool.unmapped(request.stream):
            start = block.previous if block.previous is not None and block.previous.is_free else block
            if _has_room(start, request.size):
                return start
        return self._new_range(request.pool, request.stream)

    def _new_range(self, pool: Pool, stream: int, address: int | None = None) -> Block:
        """Addresses for one and an eighth of the device's memory, in whole pages."""
        page = SMALL_SEGMENT_BYTES if pool.is_small else self.settings.large_segment_bytes
        size = round_up(self.driver.total_bytes + self.driver.total_bytes // 8, page)
        addresses = Range(self.driver.reserve(size) if address is None else address, size, page)
        block = Block(addresses.address, size, stream, pool, self._next_order(None), addresses)
        block.mapped = False
        pool.add_unmapped(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Give memory to the first `size` bytes of an unmapped block, in whole pages; False when there is none."""
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
        self._note("segment_map", address, mapped, block.stream)
        return True

    def _unmap(self, block: Block) -> None:
        """Give back the pages that lie wholly in a free block."""
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
        if pool.owner is not None:
            pool.owner.segments -= 1
        self.counters["num_device_free"] += 1
        self._note("segment_unmap", address, size, block.stream)

    # --- small things -----------------------------------------------------------------------------------------

    def _note(self, action: str, address: int, size_bytes: int, stream: int) -> None:
        self.events.append(Event(action, address, size_bytes, stream, self.mark))

    def _next_order(self, parent: Block | None) -> int:
        if self._tie == "address":
            return 0
        if self._tie == "segment" and parent is not None:
            return parent.order
        self._orders += 1
        return self._orders

    def _is_oversize(self, size: int) -> bool:
        return self.settings.max_split_bytes is not None and size >= self.settings.max_split_bytes

    def _count_split(self, pool: Pool, blocks: int, size_bytes: int) -> None:
        for statistics in pool.statistics:
            statistics.split_changed(blocks, size_bytes)

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

    def _every_stat(self) -> Iterator[Stat]:
        for statistics in self._statistics.values():
            yield from statistics
        for reserved in self._reserved_by_pool.values():
            yield from reserved.values()
        yield from (self._oversize_allocations, self._oversize_segments)

    def _every_pool(self) -> Iterator[Pool]:
        yield from (self._small, self._large)
        for private in self._private.values():
            yield from (private.small, private.large)

    def _every_mapped_block(self) -> Iterator[Block]:
        for pool in self._every_pool():
            yield from pool.free
        yield from self._live.values()
        waiting = {block for queue in self._waiting.values() for _, block in queue}
        yield from waiting.union(self._held.values(), self._deferred)


def _closest_to_full(free: list[Block], position: int) -> Block:
    """Among expandable blocks, size means the size a block can grow to; larger blocks may leave less behind."""
    block = free[position]
    for following in islice(free, position + 1, None):
        if block.range is None or following.stream != block.stream:
            break
        if following.size_when_expanded >= block.size_when_expanded:
            break
        block = following
    return block


def _not_expandable(free: list[Block], position: int) -> Block | None:
    """The next block outside expandable segments: the option was on, and is off now."""
    stream = free[position].stream
    for block in islice(free, position + 1, None):
        if block.stream != stream:
            return None
        if block.range is None:
            return block
    return None


def _has_room(start: Block, size: int) -> bool:
    available = 0
    block: Block | None = start
    while available < size and block is not None and block.is_free:
        available += block.size
        block = block.next
    return available >= size


def _segment(head: Block) -> Segment:
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
