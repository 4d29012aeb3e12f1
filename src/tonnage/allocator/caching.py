"""A replica of PyTorch's CUDACachingAllocator: the same decisions, events and statistics, without a GPU.

`docs/explanation/allocator.md` has the rules; `tests/allocator/test_allocator_against_torch.py` compares each event
and statistic with the allocator inside torch.  One object is the allocator of one device:

    allocator = CachingAllocator(Driver(24 * GIB))
    address = allocator.malloc(1000)
    allocator.free(address)
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

from tonnage.allocator.blocks import DEFAULT_POOL, Block, Pool, PoolId, PrivatePool
from tonnage.allocator.driver import Driver
from tonnage.allocator.heap import Heap
from tonnage.allocator.segments import Segment
from tonnage.allocator.settings import SMALL_BYTES, AllocatorSettings
from tonnage.allocator.stream_events import StreamEvents
from tonnage.trace.trace import Event
from tonnage.units import format_size

NEWEST: Final = "2.13"
"""Newest torch whose rules were compared; later versions are assumed to behave like it."""


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """State of the allocator when a request could not be served."""

    requested_bytes: int
    """Size of the request, rounded to a block size."""
    segment_bytes: int
    """Size of the segment that the driver could not give, which is the size in torch's own message."""
    allocated_bytes: int
    """Bytes of the allocated blocks."""
    reserved_bytes: int
    """Bytes of the segments, after all possible ones were given back."""
    free_bytes: int
    """Free bytes of the device."""
    total_bytes: int
    """Memory of the device as the driver reports it."""
    mark: int
    """Mark of the request's event (see trace.Event)."""


class OutOfMemory(Exception):
    """A request that could not be served, even after cached memory was given back."""

    def __init__(self, shortage: Shortage) -> None:
        self.shortage = shortage
        unallocated = shortage.reserved_bytes - shortage.allocated_bytes
        super().__init__(
            f"Out of memory: a segment of {format_size(shortage.segment_bytes)} was needed and "
            f"{format_size(shortage.free_bytes)} of {format_size(shortage.total_bytes)} were free; "
            f"{format_size(shortage.allocated_bytes)} are allocated, {format_size(unallocated)} more are reserved."
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

    Memory comes from `driver`.  `events` lists all decisions with torch's names; each event has the `mark` that the
    caller set.  Work of other streams (`record_stream`) finishes at once or, with `lazy=True`, when `synchronise` is
    called: a real GPU finishes it between these two moments.
    """

    def __init__(
        self,
        driver: Driver,
        settings: AllocatorSettings | None = None,
        *,
        torch_version: str = NEWEST,
        lazy: bool = False,
    ) -> None:
        self.heap = Heap(driver, settings or AllocatorSettings(), torch_version)
        self._allowed_bytes: int | None = None
        self.set_memory_fraction(self.settings.per_process_memory_fraction)
        self._stream_events = StreamEvents(self.heap, lazy=lazy)
        self._uses: list[_Use] = []

    # --- requests of a program --------------------------------------------------------------------------------

    def malloc(self, size_bytes: int, stream: int = 0) -> int:
        """Return the address of a block for `size_bytes` (at least 1).  Raises OutOfMemory."""
        if size_bytes < 1:
            raise ValueError(f"{size_bytes} bytes requested; torch requests at least 1 from its allocator.")
        if not self._is_capturing(stream):
            self._stream_events.process()
        request = self._make_request(size_bytes, stream)
        block = self._take_best_fit(request)
        if block is None:
            self._collect_garbage()
            block = self._obtain(request)
        if block is None:
            block, request = self._try_last_resorts(request)
        if block is None:
            raise self._count_out_of_memory(request)
        return self.heap.hand_out(block, request.size, size_bytes, expandable=request.expandable)

    def free(self, address: int, *, held: bool = False) -> int:
        """Free a block; other streams on which it was used may still use it.

        With `held`, the block becomes free when `complete` is called with the returned ticket, or before, when the
        allocator waits for all streams.
        """
        block = self.heap.take_back(address)
        if not held and not block.uses:
            self.heap.free(block)
            return self._stream_events.last_ticket
        self.heap.waiting.add(block)
        if held:
            self._stream_events.hold(block)
        elif self._is_capturing(block.stream, *block.uses):
            self._stream_events.defer(block)
        else:
            self._stream_events.insert(block)
        return self._stream_events.last_ticket

    def complete(self, ticket: int) -> bool:
        """End the use of a block that was freed as `held`; return False when it no longer waits."""
        return self._stream_events.complete(ticket)

    def record_stream(self, address: int, stream: int) -> None:
        """Record that the program used a block on another stream."""
        block = self.heap.live[address]
        if stream == block.stream:
            return
        block.uses.add(stream)
        if self._is_capturing(block.stream, stream):
            self._stream_events.note_use_in_capture(block, stream)

    def synchronise(self, stream: int | None = None) -> None:
        """Finish all work so far on one stream, or on all; only a lazy allocator needs it."""
        self._stream_events.synchronise(stream)

    def empty_cache(self, pool: PoolId = DEFAULT_POOL) -> None:
        """Give all segments without a block in use back to the driver."""
        self._release_cached(pool)

    def set_memory_fraction(self, fraction: float) -> None:
        """Limit the reserved bytes to this fraction of the device; 1.0 removes the limit."""
        self._allowed_bytes = None if fraction >= 1.0 else int(fraction * self.driver.total_bytes)

    # --- private pools ----------------------------------------------------------------------------------------

    def create_pool(self, pool: PoolId, *, splits: bool = True, use_on_oom: bool = False) -> None:
        """Create a private pool, or add a user to an existing one."""
        if pool in self.heap.private:
            self.heap.private[pool].users += 1
            return
        private = self.heap.add_private_pool(pool)
        private.splits, private.use_on_oom = splits, use_on_oom

    def begin_pool(self, pool: PoolId, *, streams: Iterable[int] | None = None, capturing: bool = False) -> None:
        """Serve requests (on these streams; None: all) from a private pool from now on.

        While a stream is `capturing` a graph, its events cannot be queried and memory cannot be given back; up to
        torch 2.12 this holds for all streams while any private pool is in use.
        """
        if any(pool == use.pool for use in self._uses):
            raise ValueError(f"Pool {pool} is in use already.")
        self.create_pool(pool)
        self._uses.append(_Use(pool, None if streams is None else frozenset(streams), capturing))

    def end_pool(self, pool: PoolId) -> None:
        """Stop serving requests from a private pool; it keeps its memory until it is released."""
        remaining = [use for use in self._uses if use.pool != pool]
        if len(remaining) == len(self._uses):
            raise ValueError(f"Pool {pool} is not in use.")
        self._uses = remaining

    def release_pool(self, pool: PoolId) -> None:
        """Remove a user of a private pool; without users its free segments can be given back."""
        self.heap.private[pool].users -= 1

    # --- state ------------------------------------------------------------------------------------------------

    @property
    def driver(self) -> Driver:
        """Return the driver that provides the memory."""
        return self.heap.driver

    @property
    def settings(self) -> AllocatorSettings:
        """Return the options; they may be replaced while the program runs."""
        return self.heap.settings

    @settings.setter
    def settings(self, settings: AllocatorSettings) -> None:
        self.heap.settings = settings

    @property
    def events(self) -> list[Event]:
        """Return all events so far."""
        return self.heap.events

    @property
    def mark(self) -> int:
        """Return the mark of the next events."""
        return self.heap.mark

    @mark.setter
    def mark(self, mark: int) -> None:
        self.heap.mark = mark

    @property
    def counters(self) -> dict[str, int]:
        """Return the counters of retries, out-of-memory errors and driver calls (heap.COUNTERS)."""
        return self.heap.counters

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes of all segments."""
        return self.heap.reserved_bytes

    @property
    def allocated_bytes(self) -> int:
        """Return the bytes of all allocated blocks."""
        return self.heap.all.allocated_bytes.current

    @property
    def peak_allocated_bytes(self) -> int:
        """Return the peak of `allocated_bytes` since the start or the last reset."""
        return self.heap.all.allocated_bytes.peak

    @property
    def peak_reserved_bytes(self) -> int:
        """Return the peak of `reserved_bytes` since the start or the last reset."""
        return self.heap.all.reserved_bytes.peak

    def block_size(self, address: int) -> int:
        """Return the bytes of the allocated block at `address`: the rounded request and unsplit slack."""
        return self.heap.live[address].size

    def memory_stats(self) -> dict[str, int]:
        """Return the numbers of `torch.cuda.memory_stats`, with its names."""
        return self.heap.memory_stats()

    def reset_peak_memory_stats(self) -> None:
        """Set all peaks to the current values."""
        self.heap.reset_peak_memory_stats()

    def reset_accumulated_memory_stats(self) -> None:
        """Set the sums of all increases and decreases and the counters to zero."""
        self.heap.reset_accumulated_memory_stats()

    def segments(self) -> tuple[Segment, ...]:
        """Return all segments by address."""
        return self.heap.segments()

    # --- finding a block --------------------------------------------------------------------------------------

    def _make_request(self, size_bytes: int, stream: int) -> _Request:
        size = self.settings.round_size(size_bytes)
        owner = self._private_pool_for(stream)
        if size <= SMALL_BYTES:
            pool = self.heap.small if owner is None else owner.small
        else:
            pool = self.heap.large if owner is None else owner.large
        segment_bytes = self.settings.segment_size(size)
        return _Request(size, stream, pool, segment_bytes, self.settings.expandable_segments)

    def _private_pool_for(self, stream: int) -> PrivatePool | None:
        for use in reversed(self._uses):
            if use.streams is None or stream in use.streams:
                return self.heap.private[use.pool]
        return None

    def _is_capturing(self, *streams: int) -> bool:
        if not self._uses:
            return False
        if self.heap.version < (2, 13):
            return True
        return any(
            use.capturing and (use.streams is None or not use.streams.isdisjoint(streams)) for use in self._uses
        )

    def _take_best_fit(self, request: _Request) -> Block | None:
        """Remove the best fitting free block from its pool and return it; None if there is none."""
        pool = request.pool
        if self._collects_garbage:
            pool.searches += 1
        position = pool.best_fit(request.stream, request.size)
        free = pool.free
        if position == len(free) or free[position].stream != request.stream:
            return None
        block = free[position]
        if block.range is not None:
            choose = _least_expandable if request.expandable else _next_outside_expandable
            chosen = choose(free, position)
            if chosen is None:
                return None
            block = chosen
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
        """Return a new block from the driver; None when the driver or the memory fraction does not allow it."""
        wanted = self.reserved_bytes + request.segment_bytes
        if self._allowed_bytes is not None and wanted > self._allowed_bytes:
            return None
        if self.settings.throw_on_cudamalloc_oom:
            self._reject_above_fraction(request, wanted)
        return self._expand(request) if request.expandable else self._add_segment(request)

    def _reject_above_fraction(self, request: _Request, wanted_bytes: int) -> None:
        if wanted_bytes > int(self.settings.per_process_memory_fraction * self.driver.total_bytes):
            self.counters["num_oom_rejections"] += 1
            raise OutOfMemory(self._describe_shortage(request))

    def _add_segment(self, request: _Request) -> Block | None:
        address = self.driver.malloc(request.segment_bytes)
        if address is None:
            return None
        return self.heap.add_segment(address, request.segment_bytes, request.stream, request.pool)

    def _expand(self, request: _Request) -> Block | None:
        """Return a block made by mapping memory after a free block, or to the lowest unmapped addresses that fit.

        When memory runs out in between, the memory mapped so far stays as a free block, and None is returned.
        """
        block = self._find_room(request)
        if not block.mapped and not self.heap.map(block, min(block.size, request.size)):
            return None
        while block.size < request.size:
            following = block.next
            assert following is not None  # _find_room ensures enough addresses
            if not self.heap.map(following, min(request.size - block.size, following.size)):
                return None
            block = following
        request.pool.remove(block)
        return block

    def _find_room(self, request: _Request) -> Block:
        """Return the block at which enough free or unmapped addresses begin, in a new range if necessary."""
        for block in request.pool.unmapped(request.stream):
            start = block.previous if block.previous is not None and block.previous.is_free else block
            if _has_room(start, request.size):
                return start
        return self.heap.add_range(request.pool, request.stream)

    def _try_last_resorts(self, request: _Request) -> tuple[Block | None, _Request]:
        """Return a block (or None) and the request that it serves, by the last means before an error.

        They are, in order: private pools with `use_on_oom`, the release of large cached blocks, the release of all
        cached blocks.
        """
        if request.pool.owner is None:
            for private in self.heap.private.values():
                if private.use_on_oom:
                    pool = private.small if request.pool.is_small else private.large
                    redirected = request._replace(pool=pool, expandable=False)
                    block = self._take_best_fit(redirected)
                    if block is not None:
                        return block, redirected
        if self._release_oversize(request):
            block = self._obtain(request)
            if block is not None:
                return block, request
        if self._is_capturing(request.stream):
            return None, request
        self._release_cached(DEFAULT_POOL)
        self.counters["num_alloc_retries"] += 1
        return self._obtain(request), request

    def _count_out_of_memory(self, request: _Request) -> OutOfMemory:
        """Record an out-of-memory event and return its error."""
        self.heap.note("oom", self.driver.free_bytes, request.size, request.stream)
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

    # --- giving memory back -----------------------------------------------------------------------------------

    @property
    def _collects_garbage(self) -> bool:
        return self._allowed_bytes is not None and self.settings.garbage_collection_threshold is not None

    def _collect_garbage(self) -> None:
        """Give back the oldest unsplit large blocks when the reserved memory exceeds the threshold."""
        if self._allowed_bytes is None or self.settings.garbage_collection_threshold is None:
            return
        target = self.reserved_bytes - int(self.settings.garbage_collection_threshold * self._allowed_bytes)
        pool = self.heap.large
        ages = {block: pool.searches - block.searches for block in pool.free if not block.is_split}
        reclaimed = 0
        progress = True
        while reclaimed < target and progress and ages:
            mean_age = sum(ages.values()) / len(ages)
            old = [block for block, age in ages.items() if block.range is None and age >= mean_age]
            progress = bool(old)
            for block in old:
                reclaimed += block.size
                del ages[block]
                self.heap.release_segment(block)

    def _release_oversize(self, request: _Request) -> bool:
        """Give back one block that is large enough, or several that may not be split; return False if not enough."""
        limit = self.settings.max_split_bytes
        if limit is None:
            return False
        free = request.pool.free
        wanted = max(request.size, limit)
        position = request.pool.best_fit(request.stream, wanted)
        if position < len(free) and free[position].stream == request.stream and free[position].range is None:
            self.heap.release_segment(free[position])
            return True
        released = 0
        for block in reversed(free[:position]):
            if released >= wanted or block.size < limit or block.stream != request.stream:
                break
            if block.range is None:
                released += block.size
                self.heap.release_segment(block)
        return released >= wanted

    def _release_cached(self, pool: PoolId) -> None:
        if pool == DEFAULT_POOL and not self._is_capturing():
            self._stream_events.wait()
            self._release_free(self.heap.large)
            self._release_free(self.heap.small)
        for private in [private for private in self.heap.private.values() if private.users == 0]:
            if pool not in (DEFAULT_POOL, private.id):
                continue
            if pool == private.id:
                self._stream_events.wait(private)
            self._release_free(private.small)
            self._release_free(private.large)
            if private.reserved_bytes["all"].current == 0:
                del self.heap.private[private.id]

    def _release_free(self, pool: Pool) -> None:
        expandable = [block for block in pool.free if block.range is not None]
        for block in pool.free.copy():
            if block.range is None and not block.is_split:
                self.heap.release_segment(block)
        for block in expandable:
            self.heap.unmap(block)
            if not block.is_split:
                pool.remove_unmapped(block)


def _least_expandable(free: list[Block], position: int) -> Block:
    """Return the block from `position` on that can grow to the smallest size, while the next one can grow less.

    For blocks of expandable segments the size to which they can grow counts, so a larger block may fit better.
    """
    block = free[position]
    for following in islice(free, position + 1, None):
        if block.range is None or following.stream != block.stream:
            break
        if following.size_when_expanded >= block.size_when_expanded:
            break
        block = following
    return block


def _next_outside_expandable(free: list[Block], position: int) -> Block | None:
    """Return the next block of the stream outside expandable segments, after the option was switched off."""
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
