"""The memory curve of a run, and its notes."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tonnage.catalog.devices import parse_cluster
from tonnage.estimates.estimate import StepPeak
from tonnage.estimates.from_traces import CURVE_POINTS, _note_emulated_bf16, _note_lengths, units_of


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
