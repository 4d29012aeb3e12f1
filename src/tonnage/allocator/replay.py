"""Replay of recorded requests under other settings and capacities."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tonnage.allocator import placing
from tonnage.allocator.caching import NEWEST, CachingAllocator, OutOfMemory, Shortage
from tonnage.allocator.driver import Driver
from tonnage.allocator.segments import Segment
from tonnage.allocator.settings import AllocatorSettings
from tonnage.trace.trace import Event


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Result of a replay: peaks, events and the final state of the allocator."""

    peak_allocated_bytes: int
    """Peak of the allocated blocks."""
    peak_allocated_at: int | None
    """Index of the recorded event that reached it; None when nothing was allocated."""
    peak_reserved_bytes: int
    """Peak of the segments."""
    peak_reserved_at: int | None
    """Index of the recorded event that reached it; None when nothing was reserved."""
    shortage: Shortage | None
    """The request that ran out of memory; None when all requests were served."""
    stopped_at: int | None
    """Index of the recorded event that ran out of memory; nothing after it was replayed."""
    unmatched_frees: int
    """Number of frees that were skipped, because their blocks had been allocated before the recording began."""
    events: tuple[Event, ...]
    """All events of the allocator, with the marks of the recorded events that caused them."""
    statistics: dict[str, int]
    """Final statistics, with the names of `torch.cuda.memory_stats`."""
    segments: tuple[Segment, ...]
    """Segments at the end."""

    @property
    def fits(self) -> bool:
        """Return True if all requests were served."""
        return self.shortage is None


def replay(
    events: Iterable[Event],
    settings: AllocatorSettings,
    capacity_bytes: int,
    torch_version: str = NEWEST,
    *,
    taken_bytes: int = 0,
    before: Iterable[Segment] = (),
    recorded_limit_bytes: int | None = None,
    recorded_addresses: Iterable[int] = (),
) -> Replay:
    """Serve recorded requests with a new allocator on a device of `capacity_bytes`, and return the result.

    `taken_bytes` of the device are used by the CUDA context, NCCL and other processes.  `before` are the allocator's
    segments when the recording began.  `recorded_addresses` are the addresses of the recorded segments: with them and
    the recorded settings and version, the replay equals the recording exactly (see Driver).  Memory used on other
    streams becomes free where the recording says so, or when the allocator waits for all streams.  The first request
    that cannot be served ends the replay, as it would end the program.

    A recording does not contain the program's own calls of `empty_cache`.  Segments that are given back outside a
    request count as such a call.  When a new segment follows them, they were a call if the new segment would have
    fitted anyway into `recorded_limit_bytes`, the limit of the recorded process; without a known limit (None) they
    count as the allocator's retry.  Raises CannotEstimate for a `before` that cannot be restored.
    """
    recorded, before = list(events), tuple(before)
    driver = Driver(capacity_bytes, taken_bytes=taken_bytes, recorded_addresses=recorded_addresses)
    allocator = CachingAllocator(driver, settings, torch_version=torch_version)
    player = _Player(allocator, before)
    cache_emptied = set(_find_empty_cache_calls(recorded, recorded_limit_bytes, allocator.reserved_bytes))
    shortage = stopped_at = None
    for number, event in enumerate(recorded):
        if number in cache_emptied:
            allocator.mark = event.mark
            allocator.empty_cache()
        try:
            player.play(number, event)
        except OutOfMemory as error:
            shortage, stopped_at = error.shortage, number
            break
    return Replay(
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_allocated_at=player.peak_allocated_at,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        peak_reserved_at=player.peak_reserved_at,
        shortage=shortage,
        stopped_at=stopped_at,
        unmatched_frees=player.unmatched_frees,
        events=tuple(allocator.events),
        statistics=allocator.memory_stats(),
        segments=allocator.segments(),
    )


class _Player:
    """Serves recorded requests with an allocator; it maps recorded addresses to the allocator's own."""

    def __init__(self, allocator: CachingAllocator, before: Iterable[Segment]) -> None:
        self.allocator = allocator
        self.tickets = placing.restore(allocator, before)
        self.addresses = {address: address for segment in before for address in _allocated_addresses(segment)}
        self.unmatched_frees = 0
        self.peak_allocated_at: int | None = None
        self.peak_reserved_at: int | None = None
        self._peaks = (0, 0)

    def play(self, number: int, event: Event) -> None:
        allocator = self.allocator
        if event.action == "alloc":
            allocator.mark = event.mark
            self.addresses[event.address] = allocator.malloc(event.size_bytes, event.stream)
            self._note_peaks(number)
        elif event.action == "free_requested":
            address = self.addresses.pop(event.address, None)
            if address is None:
                self.unmatched_frees += 1
                return
            allocator.mark = event.mark
            self.tickets[event.address] = allocator.free(address, held=True)
        elif event.action == "free_completed":
            ticket = self.tickets.pop(event.address, None)
            if ticket is not None:
                allocator.mark = event.mark
                allocator.complete(ticket)

    def _note_peaks(self, number: int) -> None:
        allocated, reserved = self._peaks
        if self.allocator.peak_allocated_bytes > allocated:
            self.peak_allocated_at = number
        if self.allocator.peak_reserved_bytes > reserved:
            self.peak_reserved_at = number
        self._peaks = (self.allocator.peak_allocated_bytes, self.allocator.peak_reserved_bytes)


def _find_empty_cache_calls(events: Sequence[Event], limit_bytes: int | None, reserved_bytes: int) -> Iterable[int]:
    """Yield the indices of the events at which the program itself called `empty_cache`."""
    run_start: int | None = None
    reserved_before_run = 0
    for number, (action, _, size, *_) in enumerate(events):
        if action in ("segment_free", "segment_unmap"):
            if run_start is None:
                run_start, reserved_before_run = number, reserved_bytes
            reserved_bytes -= size
            continue
        if run_start is not None:
            grows = action in ("segment_alloc", "segment_map", "oom")
            fits = action != "oom" and limit_bytes is not None and reserved_before_run + size <= limit_bytes
            if not grows or fits:
                yield run_start
            run_start = None
        if action in ("segment_alloc", "segment_map"):
            reserved_bytes += size
    if run_start is not None:
        yield run_start


def _allocated_addresses(segment: Segment) -> Iterable[int]:
    return (block.address for block in segment.blocks if block.state == "active_allocated")
