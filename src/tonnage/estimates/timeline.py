"""A Trace over time: how many bytes were in use at each event, what they were for, and where the peak is.

`blocks` finds the blocks with the bytes that the allocator counts, `categories` what each was for.  The result is
compared with torch's own counter; a difference is reported, never hidden.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tonnage.estimates.asleep import without_sleep
from tonnage.estimates.block_events import (
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Events,
    Flags,
    Numbers,
)
from tonnage.estimates.blocks import OPTIMIZER_STATE, PRIORITY, Blocks, Owners, find_blocks, with_allocator_sizes
from tonnage.estimates.categories import categorise
from tonnage.trace.trace import Mark, Trace


@dataclass(frozen=True, kw_only=True)
class Life:
    """One block from its allocation to its end."""

    address: int
    """Start address."""
    size_bytes: int
    """Bytes as the allocator counts them: rounded, with slack."""
    born: int
    """Index of its alloc event."""
    died: int
    """Index of its free_requested event; the number of events if it outlived the trace."""
    mark: int
    """The mark under which it was allocated."""
    category: str
    """One of `blocks.PRIORITY`: `parameter`, `kv_cache`, `activation`, ..."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """Memory use of one rank over its Trace."""

    blocks: Blocks
    """All blocks."""
    peak_event: int
    """Index of the first event at which most bytes were allocated."""
    peak_allocated_bytes: int
    """Most bytes allocated."""
    peak_reserved_bytes: int
    """Most bytes reserved."""
    counted_bytes: tuple[int, int]
    """The peaks as torch counts them: with memory that slept (`asleep`)."""
    allocated_by_mark: Numbers
    """Most bytes allocated from each mark to the next; one figure for a Trace without marks."""
    reserved_by_mark: Numbers
    """Most bytes reserved, likewise."""
    marks: tuple[Mark, ...]
    """The Trace's marks."""
    turns: Numbers
    """The marks at which a step or a phase begins."""
    peak_mark: int
    """The mark of the allocated peak."""

    @cached_property
    def lives(self) -> tuple[Life, ...]:
        """Return every block, in order of allocation."""
        return tuple(self._lives(slice(None)))

    def by_category(self) -> dict[str, int]:
        """Return the bytes by category at the allocated peak; they sum to peak_allocated_bytes."""
        alive = self._at_peak()
        sizes, category = self.blocks.size_bytes[alive], self.blocks.category[alive]
        return {name: int(sizes[category == code].sum()) for code, name in enumerate(PRIORITY)}

    def highest_since(self, event: int) -> int:
        """Return the most bytes allocated from an event on."""
        blocks = self.blocks
        changes = np.zeros(max(int(blocks.died.max(initial=0)), event) + 1, dtype=np.int64)
        np.add.at(changes, blocks.born, blocks.size_bytes)
        np.subtract.at(changes, blocks.died, blocks.size_bytes)
        return int(np.cumsum(changes)[event:].max(initial=0))

    def _at_peak(self) -> Flags:
        return (self.blocks.born <= self.peak_event) & (self.peak_event < self.blocks.died)

    def _lives(self, which: "Flags | slice") -> Iterator[Life]:
        blocks = self.blocks
        facts = (blocks.address, blocks.size_bytes, blocks.born, blocks.died, blocks.mark, blocks.category)
        for address, size, born, died, mark, category in zip(*(fact[which].tolist() for fact in facts), strict=True):
            yield Life(address=address, size_bytes=size, born=born, died=died, mark=mark, category=PRIORITY[category])


def timeline(trace: Trace) -> Timeline:
    """Return the sums over a Trace's allocator events.  Pure; some ten nanoseconds an event and column."""
    events = Events.of(trace)
    counted = _categorised_blocks(trace, events)
    allocated, reserved = _sum_levels(events, counted)
    blocks, asleep = without_sleep(trace, events, counted)
    if not asleep.any():
        return _make_timeline(trace, events, counted, allocated, reserved)
    held, _ = _sum_levels(events, blocks)
    walked = _make_timeline(trace, events, blocks, held, reserved - asleep)
    return replace(walked, counted_bytes=(int(allocated.max()), int(reserved.max())))


def build_steady_timeline(trace: Trace) -> Timeline:
    """Return the timeline as if the optimizer's states had existed before the first forward, as in all steps but the
    first.

    For a Trace of one step this tells what the later ones need: they do the same beside those states.
    """
    events = Events.of(trace)
    blocks = _categorised_blocks(trace, events)
    loaded = next((index for index, mark in enumerate(trace.marks) if mark.phase != "load"), 0)
    begin = int(events.begin[loaded])
    states = (blocks.category == OPTIMIZER_STATE) & (blocks.died == len(events)) & (blocks.born > begin)
    if not states.any():
        return _make_timeline(trace, events, blocks, *_sum_levels(events, blocks))
    missing = np.zeros(len(events) + 1, dtype=np.int64)
    missing[begin + 1] = blocks.size_bytes[states].sum()
    missing[blocks.born[states] + 1] = -blocks.size_bytes[states]
    allocated, reserved = (level + missing.cumsum() for level in _sum_levels(events, blocks))
    return _make_timeline(
        trace, events, replace(blocks, born=np.where(states, begin, blocks.born)), allocated, reserved
    )


def _categorised_blocks(trace: Trace, events: Events) -> Blocks:
    requested = find_blocks(events)
    owners = Owners(events, requested)
    sized = with_allocator_sizes(trace, events, requested, owners)
    return replace(sized, category=categorise(trace, events, owners.of(sized)))


def _make_timeline(trace: Trace, events: Events, blocks: Blocks, allocated: Numbers, reserved: Numbers) -> Timeline:
    """Return the timeline from the bytes allocated and reserved after each number of events."""
    peak_event = int(allocated.argmax())  # after so many events
    return Timeline(
        blocks=blocks,
        peak_event=max(peak_event - 1, 0),
        peak_allocated_bytes=int(allocated[peak_event]),
        peak_reserved_bytes=max(int(reserved.max()), 0),
        counted_bytes=(int(allocated.max()), max(int(reserved.max()), 0)),
        allocated_by_mark=_highest_by_mark(events, allocated),
        reserved_by_mark=_highest_by_mark(events, reserved),
        marks=trace.marks,
        turns=np.flatnonzero(np.diff(events.step, prepend=-1) | np.diff(events.phase, prepend=-1)),
        peak_mark=int(events.mark[peak_event - 1]) if peak_event else 0,
    )


def _sum_levels(events: Events, blocks: Blocks) -> tuple[Numbers, Numbers]:
    """Return the bytes allocated and reserved after each number of events, from none to all."""
    count = len(events)
    allocated, reserved = (np.zeros(count + 1, dtype=np.int64) for _ in range(2))
    returned = blocks.died < count
    allocated[blocks.born + 1] = blocks.size_bytes
    allocated[blocks.died[returned] + 1] = -blocks.size_bytes[returned]
    for sign, actions in ((1, (SEGMENT_ALLOC, SEGMENT_MAP)), (-1, (SEGMENT_FREE, SEGMENT_UNMAP))):
        index = events.of_kind(*actions)
        reserved[index + 1] = sign * events.size[index]
    return allocated.cumsum(), reserved.cumsum()


def _highest_by_mark(events: Events, levels: Numbers) -> Numbers:
    """Return the highest level of each mark, including the one that it began with."""
    first = events.begin
    last = np.append(first[1:], len(events))
    bounds = np.stack((first, last + 1), axis=1).reshape(-1)
    return np.maximum.reduceat(np.append(levels, 0), bounds)[::2]
