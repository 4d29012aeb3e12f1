"""Blocks of the allocator in a Trace: when each lived, where, and how many bytes it had.

The allocator's trace holds requested bytes.  The block itself is rounded up (`AllocatorSettings`), and in the large
pool it keeps a remainder of up to 1 MiB that was not worth splitting off; both count as allocated.  Free blocks of
the large pool are always larger than 1 MiB (a smaller remainder is never split off), so a gap of at most 1 MiB behind
a block, up to the next block or the end of the segment, belongs to that block.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tonnage.allocator import AllocatorSettings
from tonnage.estimates.block_events import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    Events,
    Numbers,
)
from tonnage.trace.trace import Trace
from tonnage.units import MIB

PRIORITY: Final = (
    *("parameter", "gradient", "optimizer_state", "kv_cache", "communication", "activation", "workspace"),
)
"""The categories; if several claim a block, the first one gets it."""
PARAMETER: Final = PRIORITY.index("parameter")
OPTIMIZER_STATE = PRIORITY.index("optimizer_state")
COMMUNICATION, ACTIVATION, WORKSPACE = (PRIORITY.index(name) for name in PRIORITY[4:])


@dataclass(frozen=True, kw_only=True, eq=False)
class Blocks:
    """All blocks in order of allocation, a column for each fact."""

    address: Numbers
    """Start address."""
    size_bytes: Numbers
    """Bytes as the allocator counts them."""
    born: Numbers
    """Index of the alloc event."""
    died: Numbers
    """Index of the free_requested event; the number of events if there is none."""
    gone: Numbers
    """Index of the free_completed event, after which others may have its address; the number of events if none."""
    mark: Numbers
    """The mark under which it was allocated."""
    category: Numbers
    """Index in PRIORITY."""


def find_blocks(events: Events) -> Blocks:
    """Return the blocks as requested: an alloc event, and the next events of the same address that end it."""
    born = events.of_kind(ALLOC)
    died, gone = _find_ends(events)
    return Blocks(
        address=events.address[born],
        size_bytes=events.size[born],
        born=born,
        died=died[born],
        gone=gone[born],
        mark=events.mark[born],
        category=np.full(len(born), WORKSPACE),
    )


def _find_ends(events: Events) -> tuple[Numbers, Numbers]:
    """Return for each alloc event the later events of its address with which its block is freed and gone.

    It is the number of events if there is none: the next event at its address is of another block, or there is no
    next one.
    """
    order, action = events.by_address, events.action_by_address
    address = events.address[order]
    same = np.append(address[:-1] == address[1:], False)
    behind = np.append(np.where(same[:-1], action[1:], ALLOC), ALLOC)[: len(action)]
    second = np.append(behind[1:], ALLOC)[: len(action)]
    died, gone = (np.full(len(events), len(events)) for _ in range(2))
    allocated = action == ALLOC
    requested = np.flatnonzero(allocated & (behind == FREE_REQUESTED))
    died[order[requested]] = order[requested + 1]
    completed = requested[second[requested] == FREE_COMPLETED]
    gone[order[completed]] = order[completed + 2]
    without_request = np.flatnonzero(allocated & (behind == FREE_COMPLETED))
    gone[order[without_request]] = order[without_request + 1]
    return died, gone


def with_allocator_sizes(trace: Trace, events: Events, blocks: Blocks, owners: Owners) -> Blocks:
    """Return the blocks as the allocator counts them: rounded up, and with remainders that were not worth
    splitting off.
    """
    if trace.device.get("type") == "cpu":  # the CPU's allocator does not round
        return blocks
    settings = AllocatorSettings.parse(trace.allocator_settings)
    sizes = np.unique(blocks.size_bytes)
    rounded = np.array([settings.round_size(size) for size in sizes.tolist()], dtype=np.int64)
    rounded = rounded[np.searchsorted(sizes, blocks.size_bytes)]
    blocks = replace(blocks, size_bytes=rounded)
    if settings.expandable_segments:
        return blocks
    return replace(blocks, size_bytes=rounded + _slack(events, blocks, owners))


def _slack(events: Events, blocks: Blocks, owners: Owners) -> Numbers:
    """Return the bytes behind each block that belong to it: up to 1 MiB to the next block, or to the end of the
    segment.
    """
    slack = np.zeros(len(blocks.born), dtype=np.int64)
    large = np.flatnonzero(blocks.size_bytes > MIB)
    end = blocks.address[large] + blocks.size_bytes[large]
    segment_end = _segment_ends(events, blocks.address[large], blocks.born[large])
    within = end <= segment_end
    large, end, segment_end = large[within], end[within], segment_end[within]
    limit = np.minimum(segment_end, end + MIB + 1)
    following = np.minimum(owners.next_start(end, limit, blocks.born[large]), segment_end)
    gap = following - end
    slack[large] = np.where(gap <= MIB, gap, 0)
    return slack


def _segment_ends(events: Events, address: Numbers, time: Numbers) -> Numbers:
    """Return where the segment ends that is around each address at a time; -1 if there is none."""
    ends = np.full(len(address), -1, dtype=np.int64)
    held: dict[int, int] = {}
    for first, last in _epochs(events, held):
        now = slice(*np.searchsorted(time, (first, last)))
        if held and now.start < now.stop:
            starts = np.array(sorted(held), dtype=np.int64)
            index = np.searchsorted(starts, address[now], side="right") - 1
            end = np.array([start + held[start] for start in starts.tolist()], dtype=np.int64)[index]
            ends[now] = np.where((index >= 0) & (address[now] < end), end, -1)
    return ends


def _epochs(events: Events, held: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Yield stretches of events in which segments were only added; `held` has all of them, address to size."""
    first = 0
    freed: list[int] = []
    for index in events.of_kind(SEGMENT_ALLOC, SEGMENT_FREE).tolist():
        address = int(events.address[index])
        if events.action[index] == SEGMENT_FREE:
            freed.append(address)
        else:
            if freed:
                yield first, index
                first = index
                for start in freed:
                    held.pop(start, None)
                freed = []
            held[address] = int(events.size[index])
    yield first, len(events)


class Owners:
    """Finds which block was at an address at a time.  A time is the number of events that have happened."""

    def __init__(self, events: Events, blocks: Blocks) -> None:
        self.blocks = blocks
        self.times = len(events) + 1
        born = events.by_address[events.action_by_address == ALLOC]
        number = np.empty(self.times, dtype=np.int64)
        number[blocks.born] = np.arange(len(blocks.born))
        self.order = number[born]
        """The blocks by address, and those of one address by birth."""
        address = events.address[born]
        another = np.append(True, address[1:] != address[:-1])[: len(address)]
        self.starts = address[another]
        """The addresses at which blocks began, each once."""
        rank = np.cumsum(another) - 1
        self.rank = np.empty_like(rank)
        self.rank[self.order] = rank
        """Index in `starts` of each block's address."""
        self.keys = rank * self.times + born
        """Address and birth of each block in one number, ascending."""

    def of(self, blocks: Blocks) -> Owners:
        """Return the same for the same blocks with known sizes."""
        sized = copy(self)
        sized.blocks = blocks
        return sized

    def there(self, rank: Numbers, time: Numbers) -> Numbers:
        """Return the block that began at the address of each rank and was not gone at a time; -1 if there was
        none.
        """
        index = np.searchsorted(self.keys, rank * self.times + time) - 1
        block = self.order[index]
        return np.where((index >= 0) & (self.rank[block] == rank) & (self.blocks.gone[block] >= time), block, -1)

    def allocated_under(self, mark: Numbers, address: Numbers) -> Numbers:
        """Return the blocks that were allocated under one of these marks at the address that belongs to it."""
        rank = np.searchsorted(self.starts, address)
        begins = self.starts[np.minimum(rank, len(self.starts) - 1)] == address if len(self.starts) else rank < 0
        pairs = rank[begins] << 32 | mark[begins]
        return np.flatnonzero(np.isin(self.rank << 32 | self.blocks.mark, pairs))

    def next_start(self, start: Numbers, limit: Numbers, time: Numbers) -> Numbers:
        """Return the first address in [`start`, `limit`) at which a block was at a time; else the largest integer."""
        nearest_start = np.full(len(start), np.iinfo(np.int64).max)
        first, last = np.searchsorted(self.starts, start), np.searchsorted(self.starts, limit)
        count = np.maximum(last - first, 0)
        query = np.repeat(np.arange(len(start)), count)
        rank = first[query] + np.arange(len(query)) - np.repeat(np.cumsum(count) - count, count)
        occupied = self.there(rank, time[query]) >= 0
        nearest, first_of_query = np.unique(query[occupied], return_index=True)
        nearest_start[nearest] = self.starts[rank[occupied][first_of_query]]
        return nearest_start

    def holding(self, address: Numbers, time: Numbers) -> Numbers:
        """Return the block in use that contained each address at a time; -1 if none did.

        It is the nearest block below that existed then, searched downwards, address by address, for all at once.
        """
        holder = np.full(len(address), -1)
        rank = np.searchsorted(self.starts, address, side="right") - 1
        open_queries = np.flatnonzero(rank >= 0)
        largest_bytes = self.blocks.size_bytes.max(initial=0)
        while len(open_queries):
            holder[open_queries] = self.there(rank[open_queries], time[open_queries])
            open_queries = open_queries[holder[open_queries] < 0]
            rank[open_queries] -= 1
            open_queries = open_queries[
                (rank[open_queries] >= 0) & (address[open_queries] - self.starts[rank[open_queries]] < largest_bytes)
            ]
        held = np.flatnonzero(holder >= 0)
        block = holder[held]
        inside = address[held] < self.blocks.address[block] + self.blocks.size_bytes[block]
        holder[held[~(inside & (self.blocks.died[block] >= time[held]))]] = -1
        return holder
