"""The allocator's segments and blocks at the end of a Trace, from the columns of its events."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from tonnage.allocator import AllocatorSettings
from tonnage.allocator.segments import BlockState, Segment, SegmentBlock
from tonnage.allocator.settings import SMALL_SEGMENT_BYTES
from tonnage.estimates.block_events import (
    ALLOC,
    FREE_COMPLETED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Events,
    Numbers,
)
from tonnage.estimates.blocks import Blocks, Owners, find_blocks
from tonnage.units import MIB

_MOST_SEGMENTS: Final = 30_000
_MOST_BLOCKS: Final = 200_000
"""Segments and blocks in use at the end; 60 layers of 256 experts have 184,000 weights, gradients and moments."""


def final_segments(
    events: Events, columns: Mapping[str, Sequence[int]], settings: AllocatorSettings
) -> tuple[tuple[Segment, ...], dict[int, int]]:
    """Return the segments by address, and the mark under which each block in use was allocated, by its address.

    Raises ValueError if the events contradict each other.
    """
    if len(events) and (events.address.min() < 0 or events.size.min() < 0):
        raise ValueError("it has a negative address or size")
    _check_order(events)
    start, end, origin = _held(events)
    blocks = find_blocks(events)
    live = np.flatnonzero(blocks.gone == len(events))
    for what, count, most in (("segments", len(start), _MOST_SEGMENTS), ("blocks", len(live), _MOST_BLOCKS)):
        if count > most:
            raise ValueError(f"it ends with {count:,} {what}, of at most {most:,}")
    live = live[np.argsort(blocks.address[live], kind="stable")]
    address = blocks.address[live]
    size = _sizes(events, blocks, live, (start, end), settings)
    within = np.searchsorted(start, address, side="right") - 1
    if len(live) and (within.min() < 0 or bool((address + size > end[within]).any())):
        raise ValueError("a block lies outside of all segments")
    if bool((address[1:] < (address + size)[:-1]).any()):
        raise ValueError("two blocks overlap")
    requested = blocks.size_bytes[live]
    waits = blocks.died[live] < len(events)
    streams = np.asarray(columns.get("stream", ()), dtype=np.int64)
    first = np.searchsorted(within, np.arange(len(start) + 1))
    segments = []
    for index in range(len(start)):
        own = slice(first[index], first[index + 1])
        rows = zip(
            address[own].tolist(), size[own].tolist(), requested[own].tolist(), waits[own].tolist(), strict=True
        )
        kind = int(origin[index])
        segments.append(
            Segment(
                address=int(start[index]),
                stream=int(streams[kind]),
                is_small=bool(events.size[kind] == SMALL_SEGMENT_BYTES),
                is_expandable=bool(events.action[kind] == SEGMENT_MAP),
                blocks=tuple(_fill(rows, int(start[index]), int(end[index]))),
            )
        )
    return tuple(segments), dict(zip(address.tolist(), blocks.mark[live].tolist(), strict=True))


def _check_order(events: Events) -> None:
    """Raise ValueError unless at each address a block is allocated, freed and gone in turn."""
    action = events.action_by_address
    address = events.address[events.by_address]
    begins = np.append(True, address[1:] != address[:-1])[: len(action)]
    before = np.where(begins, FREE_COMPLETED, np.append(FREE_COMPLETED, action[:-1])[: len(action)])
    if bool((action != np.where(before == FREE_COMPLETED, ALLOC, before + 1)).any()):
        raise ValueError("a block is freed that was not allocated, or allocated twice")


def _held(events: Events) -> tuple[Numbers, Numbers, Numbers]:
    """Return start and end of each segment and of each contiguous mapped part, and the event that made it."""
    index = events.of_kind(SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP)
    action, address, size = events.action[index], events.address[index], events.size[index]
    if bool((address > np.iinfo(np.int64).max - size).any()):
        raise ValueError("a segment ends behind all addresses")
    grows = (action == SEGMENT_ALLOC) | (action == SEGMENT_MAP)
    edges, place = np.unique(np.concatenate((address, address + size)), return_inverse=True)
    change = np.zeros(len(edges), dtype=np.int64)
    np.add.at(change, place[: len(index)], np.where(grows, 1, -1))
    np.add.at(change, place[len(index) :], np.where(grows, -1, 1))
    covered = np.cumsum(change)
    if len(covered) and not 0 <= covered.min() <= covered.max() <= 1:
        raise ValueError("a segment is given back that was not obtained, or obtained twice")
    own = edges[place[: len(index)]]
    made = index[grows]
    order = np.lexsort((made, own[grows]))
    starts, makers = own[grows][order], made[order]
    is_start = covered == 1
    is_start[1:] &= (covered[:-1] == 0) | np.isin(edges[1:], address[grows & (action == SEGMENT_ALLOC)])
    start = edges[is_start]
    ends = np.append(start[1:], np.iinfo(np.int64).max)[: len(start)]
    gaps = edges[covered == 0]
    end = np.minimum(ends, gaps[np.searchsorted(gaps, start, side="right")]) if len(start) else start
    origin = makers[np.searchsorted(starts, start, side="right") - 1] if len(start) else start
    return start, end, origin


def _sizes(
    events: Events, blocks: Blocks, live: Numbers, held: tuple[Numbers, Numbers], settings: AllocatorSettings
) -> Numbers:
    """Return the bytes of these blocks: rounded up, and with remainders that were not worth splitting off."""
    distinct, place = np.unique(blocks.size_bytes[live], return_inverse=True)
    rounded = np.array([settings.round_size(size) for size in distinct.tolist()], dtype=np.int64)
    sizes = rounded[place] if len(live) else np.zeros(0, dtype=np.int64)
    if settings.expandable_segments or not len(live) or not len(held[0]):
        return sizes
    large = np.flatnonzero(sizes > MIB)
    end = blocks.address[live[large]] + sizes[large]
    segment_end = held[1][np.maximum(np.searchsorted(held[0], blocks.address[live[large]], side="right") - 1, 0)]
    limit = np.minimum(segment_end, end + MIB + 1)  # beyond it nothing is searched
    behind = Owners(events, blocks).next_start(end, limit, blocks.born[live[large]])
    gap = np.minimum(behind, segment_end) - end
    whole = sizes[large] >= (settings.max_split_bytes or np.iinfo(np.int64).max)  # such a block is never split
    sizes[large] += np.where((gap > 0) & ((gap <= MIB) | whole), gap, 0)
    return sizes


def _fill(rows: "Iterator[tuple[int, int, int, bool]]", start: int, end: int) -> Iterator[SegmentBlock]:
    """Yield the blocks of a segment, with the free memory between them."""
    for address, size, requested, waits in rows:
        if address > start:
            yield SegmentBlock(start, address - start, 0, "inactive")
        state: BlockState = "active_pending_free" if waits else "active_allocated"
        yield SegmentBlock(address, size, requested, state)
        start = address + size
    if start < end:
        yield SegmentBlock(start, end - start, 0, "inactive")
