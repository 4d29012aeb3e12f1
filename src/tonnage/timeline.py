"""A Trace over time: how many bytes were in use at each event, whose they were, and where the peak is.

Sizes.  The allocator's trace holds requested bytes.  The block handed out is rounded up (`AllocatorSettings`), and
in the large pool it keeps a remainder of up to 1 MiB that was not worth splitting off; both count as allocated.
Free blocks of the large pool are always larger than 1 MiB (a smaller remainder is never split off), so a gap of
at most 1 MiB behind a block, up to the next block or the end of the segment, is that block's own.  The result is
compared with torch's own counter; a difference is reported, never hidden.

Categories.  A block is what somebody claimed it to be (parameters, gradients, optimizer states, buffers of
collectives), over its whole life.  Of the others, what a forward pass allocates and is still alive when it ends
is an activation (kept for backward), unless it is never given back (cuBLAS's workspace); the rest is workspace.
"""

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from tonnage.allocator import AllocatorSettings
from tonnage.trace import Mark, Trace
from tonnage.units import MIB

_PRIORITY = ("parameter", "gradient", "optimizer_state", "communication", "activation", "workspace")
_FORWARD = ("forward", "recompute")


@dataclass(frozen=True, kw_only=True)
class Life:
    """One block from being handed out to being given back."""

    address: int
    """Where it began."""
    size_bytes: int
    """As the allocator counts it: rounded, with slack."""
    born: int
    """Index of its alloc event."""
    died: int
    """Index of its free_requested event; the number of events if it outlived the trace."""
    mark: int
    """The mark under which it was handed out."""
    category: str
    """`parameter`, `gradient`, `optimizer_state`, `communication`, `activation` or `workspace`."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Use of one rank's memory over its Trace."""

    lives: tuple[Life, ...]
    """Every block, in order of birth."""
    peak_event: int
    """Index of the event at which most bytes were allocated first."""
    peak_allocated_bytes: int
    """Most bytes allocated."""
    peak_reserved_bytes: int
    """Most bytes reserved."""
    by_mark: tuple[tuple[int, int], ...]
    """For each mark the most bytes allocated and reserved from it to the next."""
    marks: tuple[Mark, ...]
    """The Trace's marks."""
    peak_mark: int
    """The mark of the allocated peak."""

    def by_category(self) -> dict[str, int]:
        """Bytes by category at the allocated peak; they sum to peak_allocated_bytes."""
        totals = dict.fromkeys(_PRIORITY, 0)
        for life in self.alive_at_peak():
            totals[life.category] += life.size_bytes
        return totals

    def alive_at_peak(self) -> Iterable[Life]:
        """The blocks in use at the allocated peak."""
        return (life for life in self.lives if life.born <= self.peak_event < life.died)


def timeline(trace: Trace) -> Timeline:
    """Walk through a Trace's allocator events once.  Pure; a few microseconds an event."""
    return _Walk(trace).run()


class _Block:
    """A block while it is alive; becomes a Life."""

    __slots__ = ("address", "born", "category", "died", "mark", "size")

    def __init__(self, address: int, size: int, born: int, mark: int) -> None:
        self.address, self.size, self.born, self.mark = address, size, born, mark
        self.died = -1
        self.category: str | None = None

    def claim(self, category: str) -> None:
        if self.category is None or _PRIORITY.index(category) < _PRIORITY.index(self.category):
            self.category = category


class _Walk:
    """The state of one walk over a Trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.settings = AllocatorSettings.parse(trace.allocator_settings)
        self.exact = trace.device.get("type") == "cpu"
        """Whether blocks are as large as they were asked for: the CPU's allocator does not round."""
        self.blocks: list[_Block] = []
        self.live: dict[int, _Block] = {}
        self.addresses: list[int] = []
        """Blocks not yet completely freed, sorted: the neighbours that bound a slack."""
        self.segments: dict[int, int] = {}
        self.segment_starts: list[int] = []
        self.allocated = self.reserved = 0
        self.peak = self.peak_reserved = 0
        self.peak_event = self.peak_mark = 0
        self.by_mark = [(0, 0)] * max(len(trace.marks), 1)
        self.span: list[_Block] = []
        """Blocks handed out since the forward pass that is running began."""
        self.claims: dict[int, list[tuple[int, str]]] = defaultdict(list)
        for claim in trace.claims:
            self.claims[claim.mark].append((claim.address, claim.category))
        self.sent: dict[int, set[int]] = defaultdict(set)
        for activity in trace.activities("collective"):
            self.sent[activity.mark] |= {activity.address, activity.address2}

    def run(self) -> Timeline:
        mark = -1
        for index, event in enumerate(self.trace.events()):
            while mark < event.mark:
                mark += 1
                self.begin(mark)
            if event.action == "alloc":
                self.alloc(index, event.address, event.size_bytes, mark)
                self.note(index, mark)
            elif event.action == "free_requested":
                self.free(index, event.address)
            elif event.action == "free_completed":
                self.vacate(event.address)
            elif event.action in ("segment_alloc", "segment_map"):
                self.reserve(event.action, event.address, event.size_bytes)
                self.note(index, mark)
            elif event.action in ("segment_free", "segment_unmap"):
                self.release(event.action, event.address, event.size_bytes)
            elif event.action == "oom":
                self.end_span()  # what a forward had kept until it ran out is lost on the way out of it
        for later in range(mark + 1, len(self.trace.marks)):
            self.begin(later)
        self.end_span()
        return self.result()

    def begin(self, mark: int) -> None:
        """Enter a mark: end a forward pass, settle claims, carry the level over."""
        marks = self.trace.marks
        if mark > 0 and marks[mark - 1].phase in _FORWARD and marks[mark].phase != marks[mark - 1].phase:
            self.end_span()
        for address, category in self.claims.get(mark, ()):
            block = self.holding(address)
            if block is not None:
                block.claim(category)
        for address in self.sent.get(mark, ()):
            block = self.holding(address)
            if block is not None:
                block.claim("communication")
        if mark < len(self.by_mark):
            self.by_mark[mark] = (self.allocated, self.reserved)

    def end_span(self) -> None:
        for block in self.span:
            if block.died < 0:
                block.claim("activation")
        self.span = []

    def alloc(self, index: int, address: int, requested: int, mark: int) -> None:
        size = requested
        if not self.exact:
            size = self.settings.round_size(requested)
            size += self.slack(address, size)
        block = _Block(address, size, index, mark)
        if address in self.sent.get(mark, ()):
            block.claim("communication")
        self.blocks.append(block)
        self.live[address] = block
        insort(self.addresses, address)
        self.allocated += size
        marks = self.trace.marks
        if marks and marks[mark].phase in _FORWARD:
            self.span.append(block)

    def slack(self, address: int, size: int) -> int:
        """Bytes behind the block that belong to it because they were not worth splitting off."""
        if size <= MIB or self.settings.expandable_segments or not self.segment_starts:
            return 0
        start = self.segment_starts[bisect_right(self.segment_starts, address) - 1]
        end = start + self.segments[start]
        if not start <= address < end:
            return 0
        following = bisect_right(self.addresses, address)
        if following < len(self.addresses):
            end = min(end, self.addresses[following])
        gap = end - address - size
        return gap if 0 < gap <= MIB else 0

    def free(self, index: int, address: int) -> None:
        block = self.live.pop(address, None)
        if block is not None:
            block.died = index
            self.allocated -= block.size

    def vacate(self, address: int) -> None:
        place = bisect_left(self.addresses, address)
        if place < len(self.addresses) and self.addresses[place] == address:
            del self.addresses[place]

    def reserve(self, action: str, address: int, size: int) -> None:
        self.reserved += size
        if action == "segment_alloc":
            self.segments[address] = size
            insort(self.segment_starts, address)

    def release(self, action: str, address: int, size: int) -> None:
        self.reserved -= size
        if action == "segment_free" and self.segments.pop(address, None) is not None:
            del self.segment_starts[bisect_left(self.segment_starts, address)]

    def holding(self, address: int) -> _Block | None:
        """The live block that contains this address."""
        block = self.live.get(address)
        if block is not None:
            return block
        place = bisect_right(self.addresses, address) - 1
        if place < 0:
            return None
        block = self.live.get(self.addresses[place])
        return block if block is not None and address < block.address + block.size else None

    def note(self, index: int, mark: int) -> None:
        if self.allocated > self.peak:
            self.peak, self.peak_event, self.peak_mark = self.allocated, index, mark
        if self.reserved > self.peak_reserved:
            self.peak_reserved = self.reserved
        allocated, reserved = self.by_mark[mark]
        if self.allocated > allocated or self.reserved > reserved:
            self.by_mark[mark] = (max(allocated, self.allocated), max(reserved, self.reserved))

    def category(self, block: _Block) -> str:
        """What the block was for.  What a forward keeps beyond its own step is no activation: library workspaces."""
        marks = self.trace.marks
        outlived = block.died < 0 and bool(marks) and marks[block.mark].step < marks[-1].step
        if block.category is None or (block.category == "activation" and outlived):
            return "workspace"
        return block.category

    def result(self) -> Timeline:
        count = self.trace.event_count
        return Timeline(
            lives=tuple(
                Life(
                    address=block.address,
                    size_bytes=block.size,
                    born=block.born,
                    died=block.died if block.died >= 0 else count,
                    mark=block.mark,
                    category=self.category(block),
                )
                for block in self.blocks
            ),
            peak_event=self.peak_event,
            peak_allocated_bytes=self.peak,
            peak_reserved_bytes=self.peak_reserved,
            by_mark=tuple(self.by_mark),
            marks=self.trace.marks,
            peak_mark=max(self.peak_mark, 0),
        )
