"""The allocator at the end of a Trace, from columns, beside the replica that repeats every event."""

from array import array
from dataclasses import replace

import pytest

from allocator_programs import Replica, random_program
from tonnage.allocator import AllocatorSettings, CachingAllocator, Driver
from tonnage.allocator.segments import Segment
from tonnage.estimates import final_state
from tonnage.estimates.block_events import Events
from tonnage.estimates.final_state import final_segments
from tonnage.recorder.tonnage_recorder.record_layout import ACTIONS, EVENT_COLUMNS
from tonnage.trace.trace import Event, Mark, Trace
from tonnage.units import GIB, MIB


def trace(events: list[Event]) -> Trace:
    columns = {name: array("q") for name in EVENT_COLUMNS}
    for event in events:
        row = (ACTIONS.index(event.action), event.address, event.size_bytes, event.stream, 0)
        for name, value in zip(EVENT_COLUMNS, row, strict=True):
            columns[name].append(value)
    return Trace(source="ghost", versions={}, device={}, marks=(Mark(0, "load", ""),), event_columns=columns)


def at_the_end(events: list[Event], settings: AllocatorSettings) -> tuple[Segment, ...]:
    recorded = trace(events)
    return final_segments(Events.of(recorded), recorded.event_columns, settings)[0]


def without_past(segments: tuple[Segment, ...]) -> list[Segment]:
    """Return the segments without what the program last requested of memory that is free now."""
    return [
        replace(
            segment,
            blocks=tuple(
                block._replace(requested_bytes=0) if block.state == "inactive" else block for block in segment.blocks
            ),
        )
        for segment in segments
    ]


@pytest.mark.parametrize("text", ["", "expandable_segments:True", "max_split_size_mb:64"])
@pytest.mark.parametrize("seed", range(12))
def test_it_is_the_state_that_the_events_lead_to(seed: int, text: str) -> None:
    settings = AllocatorSettings.parse(text)
    allocator = CachingAllocator(Driver(8 * GIB), settings)
    Replica(allocator, [0, 1, 2], []).run(random_program(seed, 300))
    events = list(allocator.events)
    assert without_past(at_the_end(events, settings)) == without_past(allocator.segments())


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([("alloc", 0, 512)], "outside of all segments"),
        ([("segment_alloc", 0, 2 * MIB), ("alloc", 2 * MIB - 512, 1024)], "outside of all segments"),
        ([("segment_alloc", 0, 2 * MIB), ("alloc", 0, 1024), ("alloc", 512, 512)], "overlap"),
        ([("segment_alloc", 0, 2 * MIB), ("alloc", 0, 512), ("alloc", 0, 512)], "allocated twice"),
        ([("free_requested", 0, 512)], "not allocated"),
        ([("segment_alloc", 0, 2 * MIB), ("alloc", 0, 512), ("free_completed", 0, 512)], "not allocated"),
        ([("segment_free", 0, 2 * MIB)], "not obtained"),
        ([("segment_alloc", 0, 2 * MIB)] * 2, "obtained twice"),
        ([("segment_alloc", 0, 2 * MIB), ("segment_alloc", MIB, 2 * MIB)], "obtained twice"),
        ([("segment_map", 2**62, 2**62 + 2**61)], "behind all addresses"),
        ([("segment_alloc", -512, 2 * MIB)], "negative"),
        ([("alloc", 0, -1)], "negative"),
    ],
)
def test_events_that_contradict_each_other(rows: list[tuple[str, int, int]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        at_the_end([Event(action, address, size, 0, 0) for action, address, size in rows], AllocatorSettings())


@pytest.mark.parametrize(("name", "words"), [("_MOST_BLOCKS", "2 blocks, of at most 1"), ("_MOST_SEGMENTS", "2 seg")])
def test_more_than_a_viewer_shows_is_refused(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(final_state, name, 1)
    parts = [
        (Event("segment_alloc", n * 2 * MIB, 2 * MIB, 0, 0), Event("alloc", n * 2 * MIB, 9, 0, 0)) for n in (0, 1)
    ]
    assert len(at_the_end([*parts[0]], AllocatorSettings())) == 1
    with pytest.raises(ValueError, match=words):
        at_the_end([*parts[0], *parts[1]], AllocatorSettings())


def test_no_events_are_no_segments() -> None:
    assert at_the_end([], AllocatorSettings()) == ()
