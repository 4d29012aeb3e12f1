"""A Trace over time: how many bytes were in use at each event, whose they were, and where the peak is.

Sizes.  The allocator's trace holds requested bytes.  The block handed out is rounded up (`AllocatorSettings`), and
in the large pool it keeps a remainder of up to 1 MiB that was not worth splitting off; both count as allocated.
Free blocks of the large pool are always larger than 1 MiB (a smaller remainder is never split off), so a gap of
at most 1 MiB behind a block, up to the next block or the end of the segment, is that block's own.  The result is
compared with torch's own counter; a difference is reported, never hidden.

Categories.  A block is what somebody claimed it to be (parameters, gradients, optimizer states, buffers of
collectives), over its whole life.  Of the others, what a forward pass allocates and is still alive when it ends
is an activation (kept for backward), unless it is never given back (cuBLAS's workspace); so is what a program makes
outside of any module, or in an earlier backward pass, and a backward pass gives back.  The rest is workspace.
"""

from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tonnage.allocator import AllocatorSettings
from tonnage.recorder.tonnage_recorder.layout import ACTIONS, EVENT_COLUMNS
from tonnage.trace.trace import Mark, Trace
from tonnage.units import MIB

_PRIORITY: Final = ("parameter", "gradient", "optimizer_state", "communication", "activation", "workspace")
"""The categories; where several claim a block, the first one has it."""
_STATE, _COMMUNICATION, _ACTIVATION, _WORKSPACE = (_PRIORITY.index(name) for name in _PRIORITY[2:])
_FORWARD: Final = ("forward", "recompute")
_OUTSIDE: Final = ("load", "other")
_BACKWARD: Final = ("backward", "recompute")
_ALLOC, _FREE_REQUESTED, _FREE_COMPLETED, _SEGMENT_ALLOC, _SEGMENT_FREE, _MAP, _UNMAP, _OOM = (
    ACTIONS.index(name)
    for name in (
        *("alloc", "free_requested", "free_completed", "segment_alloc"),
        *("segment_free", "segment_map", "segment_unmap", "oom"),
    )
)

Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]


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


@dataclass(frozen=True, kw_only=True, eq=False)
class _Blocks:
    """All blocks in order of birth, a column for each fact."""

    address: Numbers
    """Where it begins."""
    size_bytes: Numbers
    """As the allocator counts it."""
    born: Numbers
    """Index of its alloc event."""
    died: Numbers
    """Index of its free_requested event; the number of events if there is none."""
    gone: Numbers
    """Index of its free_completed event, after which others may have its place; the number of events if none."""
    mark: Numbers
    """The mark under which it was handed out."""
    category: Numbers
    """Place in _PRIORITY."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """Use of one rank's memory over its Trace."""

    blocks: _Blocks
    """Every block."""
    peak_event: int
    """Index of the event at which most bytes were allocated first."""
    peak_allocated_bytes: int
    """Most bytes allocated."""
    peak_reserved_bytes: int
    """Most bytes reserved."""
    allocated_by_mark: Numbers
    """For each mark the most bytes allocated from it to the next; of a Trace without marks one figure."""
    reserved_by_mark: Numbers
    """The same of bytes reserved."""
    marks: tuple[Mark, ...]
    """The Trace's marks."""
    turns: Numbers
    """The marks with which a step or a phase begins."""
    peak_mark: int
    """The mark of the allocated peak."""

    @cached_property
    def lives(self) -> tuple[Life, ...]:
        """Every block, in order of birth."""
        return tuple(self._lives(slice(None)))

    def by_category(self) -> dict[str, int]:
        """Bytes by category at the allocated peak; they sum to peak_allocated_bytes."""
        alive = self._at_peak()
        sizes, category = self.blocks.size_bytes[alive], self.blocks.category[alive]
        return {name: int(sizes[category == code].sum()) for code, name in enumerate(_PRIORITY)}

    def highest_since(self, event: int) -> int:
        """Most bytes allocated from an event on."""
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
            yield Life(
                address=address, size_bytes=size, born=born, died=died, mark=mark, category=_PRIORITY[category]
            )


def timeline(trace: Trace) -> Timeline:
    """Add up a Trace's allocator events.  Pure; some ten nanoseconds an event and column."""
    events = _Events.of(trace)
    found = _blocks(trace, events)
    return _added_up(trace, events, found, *_levels(events, found))


def settled(trace: Trace) -> Timeline:
    """The same as if the optimizer's states had been there before the first forward, as in all steps but the first.

    Of a Trace of one step this says what the later ones need: they do the same beside those states.
    """
    events = _Events.of(trace)
    found = _blocks(trace, events)
    loaded = next((index for index, mark in enumerate(trace.marks) if mark.phase != "load"), 0)
    begin = int(events.begin[loaded])
    states = (found.category == _STATE) & (found.died == len(events)) & (found.born > begin)
    if not states.any():
        return _added_up(trace, events, found, *_levels(events, found))
    missing = np.zeros(len(events) + 1, dtype=np.int64)
    missing[begin + 1] = found.size_bytes[states].sum()
    missing[found.born[states] + 1] = -found.size_bytes[states]
    allocated, reserved = (level + missing.cumsum() for level in _levels(events, found))
    return _added_up(trace, events, replace(found, born=np.where(states, begin, found.born)), allocated, reserved)


def _blocks(trace: Trace, events: "_Events") -> _Blocks:
    requested = _born(events)
    owners = _Owners(events, requested)
    found = _sized(trace, events, requested, owners)
    return replace(found, category=_categories(trace, events, owners.of(found)))


def _added_up(trace: Trace, events: "_Events", found: _Blocks, allocated: Numbers, reserved: Numbers) -> Timeline:
    """From the bytes allocated and reserved after each number of events."""
    peak_event = int(allocated.argmax())  # after so many events
    return Timeline(
        blocks=found,
        peak_event=max(peak_event - 1, 0),
        peak_allocated_bytes=int(allocated[peak_event]),
        peak_reserved_bytes=max(int(reserved.max()), 0),
        allocated_by_mark=_highest(events, allocated),
        reserved_by_mark=_highest(events, reserved),
        marks=trace.marks,
        turns=np.flatnonzero(np.diff(events.step, prepend=-1) | np.diff(events.phase, prepend=-1)),
        peak_mark=int(events.mark[peak_event - 1]) if peak_event else 0,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Events:
    """The allocator's events as columns, and where in them each mark begins."""

    action: Numbers
    address: Numbers
    size: Numbers
    """As requested."""
    mark: Numbers
    """Never falls."""
    begin: Numbers
    """For each mark, how many events happened before it."""
    step: Numbers
    """For each mark, how many optimizer steps were completed."""
    phase: Numbers
    """For each mark the place of its phase in `phases`."""
    phases: tuple[str, ...]
    """The phases that there are."""

    @staticmethod
    def of(trace: Trace) -> "_Events":
        columns = {name: np.asarray(trace.event_columns.get(name, ()), dtype=np.int64) for name in EVENT_COLUMNS}
        mark = np.maximum.accumulate(columns["mark"])
        steps, names, _ = zip(*(trace.marks or (Mark(0, "", ""),)), strict=True)
        phases = {name: place for place, name in enumerate(dict.fromkeys(names))}
        return _Events(
            action=columns["action"],
            address=columns["address"],
            size=columns["size"],
            mark=mark,
            begin=np.searchsorted(mark, np.arange(len(steps))),
            step=np.array(steps, dtype=np.int64),
            phase=np.array(itemgetter(*names, names[0])(phases)[:-1], dtype=np.int64),
            phases=tuple(phases),
        )

    def __len__(self) -> int:
        return len(self.action)

    def of_kind(self, *actions: int) -> Numbers:
        """Indices of the events of these kinds."""
        return np.flatnonzero(_any_of(self.action, actions))

    def is_in(self, phases: Iterable[str]) -> Flags:
        """For each mark, whether it is in one of these."""
        return np.array([name in phases for name in self.phases])[self.phase]

    @cached_property
    def by_address(self) -> Numbers:
        """Indices of the events of blocks, sorted by address and then by time."""
        index = self.of_kind(_ALLOC, _FREE_REQUESTED, _FREE_COMPLETED)
        return index[np.argsort(self.address[index], kind="stable")]

    @cached_property
    def action_by_address(self) -> Numbers:
        """What happened at each of them."""
        return self.action[self.by_address]


def _any_of(values: Numbers, few: Iterable[int]) -> Flags:
    found = np.zeros(len(values), dtype=np.bool_)
    for value in few:
        found |= values == value
    return found


# ---- blocks -----------------------------------------------------------------------------------------------------


def _born(events: _Events) -> _Blocks:
    """The blocks as they were requested: an alloc event, and the next events of the same address that end it."""
    born = events.of_kind(_ALLOC)
    died, gone = _ends(events)
    return _Blocks(
        address=events.address[born],
        size_bytes=events.size[born],
        born=born,
        died=died[born],
        gone=gone[born],
        mark=events.mark[born],
        category=np.full(len(born), _WORKSPACE),
    )


def _ends(events: _Events) -> tuple[Numbers, Numbers]:
    """For each alloc event the events behind it, of its address, with which its block is given back and is gone.

    The number of events where there are none: what comes next at its address is another block, or nothing.
    """
    place, action = events.by_address, events.action_by_address
    address = events.address[place]
    same = np.append(address[:-1] == address[1:], False)
    behind = np.append(np.where(same[:-1], action[1:], _ALLOC), _ALLOC)[: len(action)]
    second = np.append(behind[1:], _ALLOC)[: len(action)]
    died, gone = (np.full(len(events), len(events)) for _ in range(2))
    allocated = action == _ALLOC
    requested = np.flatnonzero(allocated & (behind == _FREE_REQUESTED))
    died[place[requested]] = place[requested + 1]
    completed = requested[second[requested] == _FREE_COMPLETED]
    gone[place[completed]] = place[completed + 2]
    at_once = np.flatnonzero(allocated & (behind == _FREE_COMPLETED))
    gone[place[at_once]] = place[at_once + 1]
    return died, gone


def _sized(trace: Trace, events: _Events, blocks: _Blocks, owners: "_Owners") -> _Blocks:
    """The blocks as the allocator counts them: rounded up, and with what was not worth splitting off behind them."""
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


def _slack(events: _Events, blocks: _Blocks, owners: "_Owners") -> Numbers:
    """Bytes behind each block that belong to it: up to 1 MiB to the next block, or to the end of the segment."""
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


def _segment_ends(events: _Events, address: Numbers, time: Numbers) -> Numbers:
    """Where the segment around each address ends that is there at a time; -1 where none is."""
    ends = np.full(len(address), -1, dtype=np.int64)
    held: dict[int, int] = {}
    for first, last in _epochs(events, held):
        now = slice(*np.searchsorted(time, (first, last)))
        if held and now.start < now.stop:
            starts = np.array(sorted(held), dtype=np.int64)
            place = np.searchsorted(starts, address[now], side="right") - 1
            end = np.array([start + held[start] for start in starts.tolist()], dtype=np.int64)[place]
            ends[now] = np.where((place >= 0) & (address[now] < end), end, -1)
    return ends


def _epochs(events: _Events, held: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Stretches of events in which segments were only added: `held` has all of them, address to size."""
    first = 0
    freed: list[int] = []
    for index in events.of_kind(_SEGMENT_ALLOC, _SEGMENT_FREE).tolist():
        address = int(events.address[index])
        if events.action[index] == _SEGMENT_FREE:
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


class _Owners:
    """Which block was at an address at a time.  A time is the number of events that have happened."""

    def __init__(self, events: _Events, blocks: _Blocks) -> None:
        self.blocks = blocks
        self.times = len(events) + 1
        born = events.by_address[events.action_by_address == _ALLOC]
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
        """For each block the place of its address in `starts`."""
        self.keys = rank * self.times + born
        """Address and birth of each block in one number, ascending."""

    def of(self, blocks: _Blocks) -> "_Owners":
        """The same of the same blocks, whose sizes are known now."""
        sized = copy(self)
        sized.blocks = blocks
        return sized

    def there(self, rank: Numbers, time: Numbers) -> Numbers:
        """The block that began at the address of each rank and was not gone at a time; -1 where there was none."""
        place = np.searchsorted(self.keys, rank * self.times + time) - 1
        block = self.order[place]
        return np.where((place >= 0) & (self.rank[block] == rank) & (self.blocks.gone[block] >= time), block, -1)

    def handed_out(self, mark: Numbers, address: Numbers) -> Numbers:
        """The blocks that were handed out under one of these marks at the address that goes with it."""
        rank = np.searchsorted(self.starts, address)
        begins = self.starts[np.minimum(rank, len(self.starts) - 1)] == address if len(self.starts) else rank < 0
        pairs = rank[begins] << 32 | mark[begins]
        return np.flatnonzero(np.isin(self.rank << 32 | self.blocks.mark, pairs))

    def next_start(self, start: Numbers, limit: Numbers, time: Numbers) -> Numbers:
        """The first address from `start` to before `limit` at which a block was at a time; else a huge number."""
        found = np.full(len(start), np.iinfo(np.int64).max)
        first, last = np.searchsorted(self.starts, start), np.searchsorted(self.starts, limit)
        count = np.maximum(last - first, 0)
        query = np.repeat(np.arange(len(start)), count)
        rank = first[query] + np.arange(len(query)) - np.repeat(np.cumsum(count) - count, count)
        occupied = self.there(rank, time[query]) >= 0
        nearest, place = np.unique(query[occupied], return_index=True)
        found[nearest] = self.starts[rank[occupied][place]]
        return found

    def holding(self, address: Numbers, time: Numbers) -> Numbers:
        """The block in use that contained each address at a time; -1 where none did.

        The nearest block below that was there then: looked for downwards, address by address, for all at once.
        """
        holder = np.full(len(address), -1)
        rank = np.searchsorted(self.starts, address, side="right") - 1
        asked = np.flatnonzero(rank >= 0)
        largest_bytes = self.blocks.size_bytes.max(initial=0)
        while len(asked):
            holder[asked] = self.there(rank[asked], time[asked])
            asked = asked[holder[asked] < 0]
            rank[asked] -= 1
            asked = asked[(rank[asked] >= 0) & (address[asked] - self.starts[rank[asked]] < largest_bytes)]
        held = np.flatnonzero(holder >= 0)
        block = holder[held]
        inside = address[held] < self.blocks.address[block] + self.blocks.size_bytes[block]
        holder[held[~(inside & (self.blocks.died[block] >= time[held]))]] = -1
        return holder


# ---- categories -------------------------------------------------------------------------------------------------


def _categories(trace: Trace, events: _Events, owners: _Owners) -> Numbers:
    """What each block was for.  What a forward keeps beyond its own step is no activation: library workspaces."""
    blocks = owners.blocks
    category = np.full(len(blocks.born), _WORKSPACE)
    category[_kept_by_forward(events, blocks)] = _ACTIVATION
    sent = _sent(trace)
    said = [(claim.mark, claim.address, _PRIORITY.index(claim.category)) for claim in trace.claims]
    claimed = np.array(said, dtype=np.int64).reshape(-1, 3)
    for mark, address, code in (claimed.T, (*sent.T, np.full(len(sent), _COMMUNICATION))):
        known = mark < len(events.begin)
        holder = owners.holding(address[known], events.begin[mark[known]])
        np.minimum.at(category, holder[holder >= 0], code[known][holder >= 0])
    received = owners.handed_out(*sent.T)
    category[received] = np.minimum(category[received], _COMMUNICATION)
    category[(category == _ACTIVATION) & _outlived(events, blocks)] = _WORKSPACE
    for first, later in _repetitions(trace, events, blocks):
        count = min(len(first), len(later))
        category[later[:count]] = category[first[:count]]
    return category


def _repetitions(trace: Trace, events: _Events, blocks: _Blocks) -> Iterator[tuple[Numbers, Numbers]]:
    """For each repetition of a step's requests the blocks of the step that it repeats, and its own, in order.

    What the step gave back is repeated; a repetition has fewer blocks where the memory ran out.
    """
    if not trace.repeated:
        return
    began, *again = events.begin[list(trace.repeated)].tolist()
    ends = [*again[1:], len(events)]
    first = np.flatnonzero((blocks.gone >= began) & (blocks.gone < again[0]))
    for start, end in zip(again, ends, strict=True):
        yield first, np.flatnonzero((blocks.born >= start) & (blocks.born < end))


def _kept_by_forward(events: _Events, blocks: _Blocks) -> Flags:
    """Which blocks a forward pass (or a recomputation) handed out and had not got back when it ended.

    It ends where the phase changes, where the memory runs out (what it had kept is lost on the way out), or with
    the trace.
    """
    forward = events.is_in(_FORWARD)
    changes = np.flatnonzero(forward[:-1] & (events.phase[1:] != events.phase[:-1])) + 1
    ends = np.sort(np.concatenate((events.begin[changes], events.of_kind(_OOM), [len(events)])))
    end = ends[np.searchsorted(ends, blocks.born, side="right")]
    kept: Flags = forward[blocks.mark] & (blocks.died >= end)
    return kept | _taken_up_by_backward(events, blocks)


def _taken_up_by_backward(events: _Events, blocks: _Blocks) -> Flags:
    """Which blocks were given back by a backward pass, for which they were kept, and made outside of any module.

    Or by a backward pass before it: one that makes a graph itself (of a penalty on gradients).
    """
    outside, backward = events.is_in(_OUTSIDE), events.is_in(_BACKWARD)
    passes = np.cumsum(np.diff(backward, prepend=False))
    given_back = blocks.died < len(events)
    taken: Flags = (outside | backward)[blocks.mark] & given_back
    made, gone = blocks.mark[taken], events.mark[blocks.died[taken]]
    taken[taken] = backward[gone] & (passes[made] != passes[gone])
    return taken


def _sent(trace: Trace) -> Numbers:
    """Mark and address of what each collective reads or writes, a row each, every row once."""
    found = {
        (activity.mark, address)
        for activity in trace.activities("collective")
        for address in (activity.address, activity.address2)
    }
    return np.array(sorted(found), dtype=np.int64).reshape(-1, 2)


def _outlived(events: _Events, blocks: _Blocks) -> Flags:
    """Which blocks were never given back and are of a step before the last."""
    outlived: Flags = (blocks.died == len(events)) & (events.step[blocks.mark] < events.step[-1])
    return outlived


# ---- levels -----------------------------------------------------------------------------------------------------


def _levels(events: _Events, blocks: _Blocks) -> tuple[Numbers, Numbers]:
    """Bytes allocated and reserved after each number of events, from none to all."""
    count = len(events)
    allocated, reserved = (np.zeros(count + 1, dtype=np.int64) for _ in range(2))
    returned = blocks.died < count
    allocated[blocks.born + 1] = blocks.size_bytes
    allocated[blocks.died[returned] + 1] = -blocks.size_bytes[returned]
    for sign, actions in ((1, (_SEGMENT_ALLOC, _MAP)), (-1, (_SEGMENT_FREE, _UNMAP))):
        index = events.of_kind(*actions)
        reserved[index + 1] = sign * events.size[index]
    return allocated.cumsum(), reserved.cumsum()


def _highest(events: _Events, levels: Numbers) -> Numbers:
    """The highest level of each mark, including the one that it began with."""
    first = events.begin
    last = np.append(first[1:], len(events))
    bounds = np.stack((first, last + 1), axis=1).reshape(-1)
    return np.maximum.reduceat(np.append(levels, 0), bounds)[::2]
