"""A replica of PyTorch's CUDACachingAllocator: the same decisions, events and statistics, without a GPU.

The rules are in `docs/explanation/allocator.md`; `tests/allocator/test_allocator_against_torch.py` compares every
event and statistic with the allocator inside torch.  One object is the allocator of one device.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

from tonnage.allocator.blocks import DEFAULT_POOL, Block, Pool, PoolId, PrivatePool
from tonnage.allocator.driver import Driver
from tonnage.allocator.heap import Heap
from tonnage.allocator.segments import Segment
from tonnage.allocator.settings import SMALL_BYTES, AllocatorSettings
from tonnage.trace.trace import Event
from tonnage.units import size as in_units

NEWEST: Final = "2.13"
"""The newest torch whose rules were compared; later ones are taken to behave like it."""


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
        self.heap = Heap(driver, settings or AllocatorSettings(), torch_version)
        self._allowed_bytes: int | None = None
        self.set_memory_fraction(self.settings.per_process_memory_fraction)
        self._held: dict[int, Block] = {}
        self._waiting: dict[int, deque[tuple[int, Block]]] = {}
        self._lazy = lazy
        self._tickets = 0
        self._finished_everywhere = 0
        self._finished: dict[int, int] = {}
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
        return self.heap.hand_out(block, request.size, size_bytes, expandable=request.expandable)

    def free(self, address: int, *, held: bool = False) -> int:
        """The program is done with a block; other streams on which it was used may not be.

        With `held`, the caller decides when those are: at `complete` of the returned ticket, or before, when all
        streams are waited for.
        """
        block = self.heap.take_back(address)
        if not held and not block.uses:
            self.heap.free(block)
            return self._tickets
        self.heap.waiting.add(block)
        if held:
            block.events = 1
            self._tickets += 1
            self._held[self._tickets] = block
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
        block = self.heap.live[address]
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
        if pool in self.heap.private:
            self.heap.private[pool].users += 1
            return
        private = self.heap.add_private_pool(pool)
        private.splits, private.use_on_oom = splits, use_on_oom

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
        self.heap.private[pool].users -= 1

    # --- what a caller reads ----------------------------------------------------------------------------------

    @property
    def driver(self) -> Driver:
        """Where memory comes from."""
        return self.heap.driver

    @property
    def settings(self) -> AllocatorSettings:
        """The options; they may be replaced while the program runs."""
        return self.heap.settings

    @settings.setter
    def settings(self, settings: AllocatorSettings) -> None:
        self.heap.settings = settings

    @property
    def events(self) -> list[Event]:
        """Everything that was done."""
        return self.heap.events

    @property
    def mark(self) -> int:
        """What the next events carry as their mark."""
        return self.heap.mark

    @mark.setter
    def mark(self, mark: int) -> None:
        self.heap.mark = mark

    @property
    def counters(self) -> dict[str, int]:
        """Retries, times out of memory, calls of the driver (heap.COUNTERS)."""
        return self.heap.counters

    @property
    def reserved_bytes(self) -> int:
        """Bytes held from the driver."""
        return self.heap.reserved_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the blocks that the program holds."""
        return self.heap.all.allocated_bytes.current

    @property
    def peak_allocated_bytes(self) -> int:
        """The highest `allocated_bytes` since the start or the last reset."""
        return self.heap.all.allocated_bytes.peak

    @property
    def peak_reserved_bytes(self) -> int:
        """The highest `reserved_bytes` since the start or the last reset."""
        return self.heap.all.reserved_bytes.peak

    def block_size(self, address: int) -> int:
        """Bytes of the handed-out block at `address`: the request, rounded, and the slack of a block not split."""
        return self.heap.live[address].size

    def memory_stats(self) -> dict[str, int]:
        """The numbers of `torch.cuda.memory_stats`, under its names."""
        return self.heap.memory_stats()

    def reset_peak_memory_stats(self) -> None:
        """Let every peak be the present value."""
        self.heap.reset_peak_memory_stats()

    def reset_accumulated_memory_stats(self) -> None:
        """Forget what was ever added and taken away, and the counters."""
        self.heap.reset_accumulated_memory_stats()

    def segments(self) -> tuple[Segment, ...]:
        """Everything held from the driver, by address."""
        return self.heap.segments()

    # --- finding a block --------------------------------------------------------------------------------------

    def _request(self, size_bytes: int, stream: int) -> _Request:
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
        return self._expand(request) if request.expandable else self._new_segment(request)

    def _reject_above_fraction(self, request: _Request, wanted_bytes: int) -> None:
        if wanted_bytes > int(self.settings.per_process_memory_fraction * self.driver.total_bytes):
            self.counters["num_oom_rejections"] += 1
            raise OutOfMemory(self._describe_shortage(request))

    def _new_segment(self, request: _Request) -> Block | None:
        address = self.driver.malloc(request.segment_bytes)
        if address is None:
            return None
        return self.heap.add_segment(address, request.segment_bytes, request.stream, request.pool)

    def _expand(self, request: _Request) -> Block | None:
        """A block made by mapping memory behind a free block, or to unmapped addresses, at the lowest that fit.

        When memory runs out half way, what was mapped stays as a free block.
        """
        block = self._room(request)
        if not block.mapped and not self.heap.map(block, min(block.size, request.size)):
            return None
        while block.size < request.size:
            following = block.next
            assert following is not None  # _room saw enough addresses
            if not self.heap.map(following, min(request.size - block.size, following.size)):
                return None
            block = following
        request.pool.remove(block)
        return block

    def _room(self, request: _Request) -> Block:
        for block in request.pool.unmapped(request.stream):
            start = block.previous if block.previous is not None and block.previous.is_free else block
            if _has_room(start, request.size):
                return start
        return self.heap.add_range(request.pool, request.stream)

    def _last_resorts(self, request: _Request) -> tuple[Block | None, _Request]:
        """Pools lent for this moment; then giving back large cached blocks; then all of them."""
        if request.pool.owner is None:
            for private in self.heap.private.values():
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
            self._finish(block)

    def _finish(self, block: Block) -> None:
        self.heap.waiting.discard(block)
        self.heap.free(block)

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
                self._finish(block)

    # --- giving memory back -----------------------------------------------------------------------------------

    @property
    def _collects_garbage(self) -> bool:
        return self._allowed_bytes is not None and self.settings.garbage_collection_threshold is not None

    def _collect_garbage(self) -> None:
        """Give back the oldest unsplit large blocks when the reserved memory is above the threshold."""
        if self._allowed_bytes is None or self.settings.garbage_collection_threshold is None:
            return
        target = self.reserved_bytes - int(self.settings.garbage_collection_threshold * self._allowed_bytes)
        pool = self.heap.large
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
                self.heap.release_segment(block)

    def _release_oversize(self, request: _Request) -> bool:
        """Give back one block that is large enough, or several that may not be split; False when not enough."""
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
            self._wait_for_events()
            self._release_free(self.heap.large)
            self._release_free(self.heap.small)
        for private in [private for private in self.heap.private.values() if private.users == 0]:
            if pool not in (DEFAULT_POOL, private.id):
                continue
            if pool == private.id:
                self._wait_for_events(private)
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
