"""The memory curve of a run, and its notes."""

from array import array
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.catalog.devices import parse_cluster
from tonnage.estimates.estimate import StepPeak
from tonnage.estimates.from_traces import (
    CURVE_POINTS,
    _note_emulated_bf16,
    _note_lengths,
    estimate_from_traces,
    units_of,
)
from tonnage.recorder.tonnage_recorder.record_layout import ACTIONS, EVENT_COLUMNS
from tonnage.trace.trace import Mark, Trace
from tonnage.units import MIB


def test_steps_alone_are_shown_mark_by_mark() -> None:
    assert units_of([False] * 5) == [range(place, place + 1) for place in range(5)]
    assert units_of([]) == []


def test_a_long_evaluation_leaves_the_steps_two_thirds() -> None:
    """9,000 marks of evaluation before 600 of steps: 30 at a time are 300."""
    units = units_of([True] * 9000 + [False] * 600)
    assert [len(unit) for unit in units[:301]] == [30] * 300 + [1]
    assert len(units) == 900


def test_a_short_one_is_shown_whole() -> None:
    assert len(units_of([True] * 100 + [False] * 200)) == 300


@given(st.lists(st.booleans(), max_size=50).map(lambda some: [flag for flag in some for _ in range(40)]))
def test_units_follow_each_other_and_mix_nothing(besides: list[bool]) -> None:
    units = units_of(besides)
    assert [place for unit in units for place in unit] == list(range(len(besides)))
    assert all(len({besides[place] for place in unit}) == 1 for unit in units)
    assert all(before.stop == after.start for before, after in pairwise(units))
    stretches = sum(before and not after for before, after in pairwise([False, *besides, False]))
    room = max((len(besides) - sum(besides)) // 2, CURVE_POINTS // 4)
    assert sum(besides[unit.start] for unit in units) <= room + stretches


def test_a_card_that_goes_round_bf16_is_said() -> None:
    old, new = parse_cluster("t4"), parse_cluster("a100-40gb")
    [said] = _note_emulated_bf16({"precision": "bf16-mixed"}, old)
    assert "choose --precision fp16-mixed" in said
    for plan, cluster in (({"precision": "bf16-mixed"}, new), ({"precision": "fp16-mixed"}, old), ({}, old)):
        assert _note_emulated_bf16(plan, cluster) == []


def test_lengths_that_were_cut_are_said() -> None:
    steps = [StepPeak(step=number, allocated_bytes=2**20, reserved_bytes=2**21) for number in (1, 2, 3)]
    [said] = _note_lengths({"lengths": ("64", "512"), "seq_len": 256}, steps)
    assert said.startswith("Cut at seq-len, 256 tokens: 1 of 2 lengths, up to 512. Steps with the longest sequences")
    [said] = _note_lengths({"lengths": ("64", "256"), "seq_len": 256}, steps)
    assert "Cut" not in said


@pytest.mark.parametrize("free_mib", [0, 50, 5000])
def test_what_comes_on_top_at_last_takes_the_place_of_what_is_cached(free_mib: int) -> None:
    """A context that the allocator could not see: its cached blocks make room, and no process exceeds its card."""
    cluster = parse_cluster("t4")
    capacity = cluster.device.capacity_bytes
    reserved = (capacity // MIB - free_mib) * MIB
    allocated = reserved - 1024 * MIB
    columns = {name: array("q") for name in EVENT_COLUMNS}
    for action, size in (("segment_alloc", reserved), ("alloc", allocated)):
        for name, value in zip(EVENT_COLUMNS, (ACTIONS.index(action), 0, size, 0, 0), strict=True):
            columns[name].append(value)
    trace = Trace(
        source="ghost",
        versions={},
        device={},
        marks=(Mark(step=0, phase="forward", module=""),),
        event_columns=columns,
    )
    peak = estimate_from_traces([trace], cluster, model={}, job={}, plan={}).estimate.peak
    assert peak.process_bytes == min(capacity, reserved + cluster.device.context_bytes)
    assert sum(peak.by_category.values()) == peak.process_bytes
    assert (peak.reserved_bytes, peak.allocated_bytes) == (reserved, allocated)
