"""A Trace as a snapshot has the same events, the live blocks, and modules instead of call stacks."""

import pickle
from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.allocator import snapshot
from tonnage.errors import CannotEstimate
from tonnage.recorder.tonnage_recorder.record_layout import ACTIONS, EVENT_COLUMNS
from tonnage.report import viewer
from tonnage.trace.trace import Mark, Trace
from tonnage.units import MIB

BASE = 0x7F0000000000


def trace(*rows: tuple[str, int, int, int]) -> Trace:
    """Return a Trace of rows of action, address, size and mark, on stream 0."""
    columns = [(ACTIONS.index(action), address, size, 0, mark) for action, address, size, mark in rows]
    return Trace(
        source="ghost",
        versions={},
        device={"total_bytes": 80 * 1024 * MIB},
        marks=(Mark(step=0, phase="forward", module="layers.0"), Mark(step=1, phase="optimizer", module="")),
        event_columns={
            name: array("q", column) for name, column in zip(EVENT_COLUMNS, zip(*columns, strict=True), strict=True)
        },
    )


TWO_BLOCKS = trace(
    ("segment_alloc", BASE, 2 * MIB, 0),
    ("alloc", BASE, 1000, 0),
    ("alloc", BASE + 1024, 512, 1),
    ("free_requested", BASE, 1000, 1),
    ("free_completed", BASE, 1000, 1),
)


def test_written_snapshot_reads_back(tmp_path):
    path = tmp_path / "snapshot.pickle"
    viewer.write(TWO_BLOCKS, path)
    read = snapshot.read(path)
    (memory,) = read.devices
    assert [event.action for event in memory.events] == [event.action for event in TWO_BLOCKS.events()]
    (segment,) = memory.segments
    assert segment.size_bytes == 2 * MIB
    # 1,000 bytes were rounded to 1,024 and freed; 512 are allocated; the rest was never allocated.
    assert [(block.size_bytes, block.state) for block in segment.blocks] == [
        (1024, "inactive"),
        (512, "active_allocated"),
        (2 * MIB - 1536, "inactive"),
    ]


def test_modules_replace_call_stacks(tmp_path):
    path = tmp_path / "snapshot.pickle"
    viewer.write(TWO_BLOCKS, path)
    plain = pickle.loads(path.read_bytes())
    (first, allocated, second, *_), (segment,) = plain["device_traces"][0], plain["segments"]
    assert first["frames"] == allocated["frames"] == [{"filename": "layers.0", "line": 1, "name": "forward"}]
    assert second["frames"] == [{"filename": "(no module)", "line": 2, "name": "optimizer"}]
    assert segment["blocks"][1]["frames"] == second["frames"]


@settings(max_examples=200)
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from(ACTIONS),
            st.sampled_from([BASE, BASE + 512, BASE + 2 * MIB, 0, -1, 2**62]),
            st.sampled_from([0, 1, 512, 2 * MIB, 20 * MIB, -512, 2**62]),
            st.integers(0, 1),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_any_trace_is_a_snapshot_or_a_clear_error(rows, tmp_path):
    try:
        viewer.write(trace(*rows), tmp_path / "snapshot.pickle")
    except CannotEstimate:
        return
    snapshot.read(tmp_path / "snapshot.pickle")


def test_unknown_allocator_settings_are_a_clear_error(tmp_path):
    with pytest.raises(CannotEstimate, match="no snapshot can be made of it"):
        viewer.write(replace(TWO_BLOCKS, allocator_settings="no_such_option:1"), tmp_path / "snapshot.pickle")


def test_contradictory_trace_is_an_error_and_leaves_no_file(tmp_path):
    with pytest.raises(CannotEstimate):
        viewer.write(trace(("free_requested", BASE, 512, 0)), tmp_path / "snapshot.pickle")
    assert list(tmp_path.iterdir()) == []
