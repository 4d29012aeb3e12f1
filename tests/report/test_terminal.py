"""The terminal report: golden texts, and properties that hold at all widths, with and without colour."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

import estimates
from tonnage.estimates.estimate import Advice, Coverage, Host, Moment
from tonnage.report import wording
from tonnage.report.html import page
from tonnage.report.terminal import render, render_suggestions
from tonnage.units import GIB, MIB

GOLDEN = Path(__file__).parent / "golden"
CASES = {
    "fitting-100": (estimates.fitting, {"width": 100}),
    "fitting-100-colour": (estimates.fitting, {"width": 100, "colour": True}),
    "full-card-80": (estimates.full_card, {"width": 80}),
    "scripted-60-ascii": (estimates.scripted, {"width": 60, "unicode": False}),
}
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("name", CASES)
def test_golden_text(name):
    """The report equals its golden file; TONNAGE_WRITE_GOLDEN=1 writes the files: check their differences."""
    make, options = CASES[name]
    text = render(make(), **options)
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("TONNAGE_WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("make", [estimates.fitting, estimates.full_card, estimates.scripted])
@pytest.mark.parametrize("width", [1, 40, 41, 59, 60, 61, 80, 99, 100, 137, 200, 500])
def test_no_line_is_wider_than_requested(make, width):
    lines = render(make(), width=width).splitlines()
    assert max(map(cell_len, lines)) <= min(max(width, 40), 200)
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize("make", [estimates.fitting, estimates.full_card, estimates.scripted])
def test_nothing_is_cut_off_on_a_narrow_terminal(make):
    narrow, wide = render(make(), width=40), render(make(), width=100)
    assert "…" not in narrow
    for row in re.findall(r"^  (\w[\w ]*?)  +([\d.]+ \w+)  +([\d.]+ \w+)  +[\d.]+ %$", wide, re.MULTILINE):
        assert re.search(rf"^  {row[0]}  +{row[1]}  +{row[2]}$", narrow, re.MULTILINE)


@pytest.mark.parametrize("make", [estimates.fitting, estimates.full_card])
def test_colour_changes_no_words(make):
    plain, coloured = render(make()), render(make(), colour=True)
    assert "\x1b" not in plain
    assert "\x1b" in coloured
    words = re.compile(r"[A-Za-z0-9.]+")
    assert words.findall(plain) == words.findall(ESCAPE.sub("", coloured))


def test_ascii_is_ascii():
    render(estimates.full_card(), unicode=False).encode("ascii")


def bar(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("▕"))[1:-1]


def test_bar_has_the_length_of_the_card():
    # 98 cells for 80 GiB: 14 GiB are 17.15 cells, 28 GiB 34.3, 20 GiB free 24.5.
    drawn = bar(render(estimates.fitting(), width=100))
    assert len(drawn) == 98
    assert (drawn.count("█"), drawn.count("▓"), drawn.count("▒"), drawn.count("·")) == (17, 17, 35, 24)


@settings(max_examples=50)
@given(held=st.lists(st.integers(0, 10 * GIB), min_size=9, max_size=9), width=st.integers(40, 200))
def test_any_bar_fills_its_line(held, width):
    before = estimates.fitting()
    by_category = dict(zip(before.peak.by_category, held, strict=True))
    peak = replace(before.peak, by_category=by_category, process_bytes=sum(held))
    text = render(replace(before, peak=peak), width=width)
    assert len(bar(text)) == width - 2
    for name, value in by_category.items():
        if value == 0:
            assert f"\n {name} " not in text


def test_more_than_the_card_still_fills_one_line():
    estimate = estimates.fitting()
    small = replace(estimate, cluster={**estimate.cluster, "capacity_bytes": 10 * GIB})
    assert len(bar(render(small, width=100))) == 98


def test_small_amount_is_not_shown_as_zero():
    peak = estimates.peak()
    held = {**peak.by_category, "communication": 512, "workspace": 256 * MIB - 512}
    text = render(replace(estimates.fitting(), peak=replace(peak, by_category=held)))
    assert re.search(r"communication +512 B", text)


def test_numbers_of_the_verdict():
    first = render(estimates.fitting()).splitlines()[0]
    assert first == "FITS  60.00 GiB of 80.00 GiB (75.0 %); 20.00 GiB free."


def test_tight_fit_is_marked():
    estimate = estimates.fitting()
    peak = replace(estimate.peak, high_bytes=81 * GIB)
    text = render(replace(estimate, peak=peak))
    assert text.startswith("FITS, BARELY")
    assert "the upper end exceeds the card's memory" in text


def test_unknown_values_are_called_unknown():
    bare = replace(
        estimates.fitting(),
        model={},
        job={},
        plan={},
        cluster={},
        phases=(),
        curve=(),
        versions={},
        host=Host(peak_bytes=None, pinned_bytes=0),
        coverage=Coverage(),
    )
    text = render(bare)
    assert "resident size unknown" in text
    assert "free" not in text


def test_out_of_memory_shows_the_message_the_users_frames_and_suggestions():
    text = " ".join(render(estimates.full_card(), width=200).split())
    assert estimates.MESSAGE in text
    assert "/home/ada/train.py:61 main" in text
    assert "... 2 frames left out" in text
    assert "--allocator expandable" in text


def test_without_a_curve_there_is_no_timeline():
    assert "Memory through the steps" not in render(replace(estimates.fitting(), curve=()))
    idle = (Moment(mark=0, phase="load", allocated_bytes=0, reserved_bytes=0),) * 2
    assert "Memory through the steps" not in render(replace(estimates.fitting(), curve=idle))


def test_steps_are_marked():
    text = render(estimates.fitting(), width=100)
    axis = next(line for line in text.splitlines() if "step 1" in line and "└" in line)
    assert "┴ step 2" in axis
    assert "step 3" not in axis


def test_ranks_with_equal_numbers_share_a_row():
    text = render(estimates.full_card())
    assert re.search(r"^  1-3 +yes +58.00 GiB", text, re.MULTILINE)


def test_many_different_ranks_are_cut_off():
    ranks = tuple(
        estimates.rank_entry(rank, True, estimates.peak(process_bytes=60 * GIB + rank * MIB * 11))
        for rank in range(1024)
    )
    text = render(replace(estimates.fitting(), ranks=ranks))
    assert "1012 more rows in --json" in text


@pytest.mark.parametrize(("change", "listed"), [({"gpu": "l4"}, True), ({"loss": "fused"}, False)])
def test_what_may_help_is_listed_where_no_change_of_the_job_was_tried(change, listed):
    """Another card is no such change."""
    amounts = {"peak_bytes": 20 * GIB, "gain_bytes": 0, "step_seconds": None}
    tried = Advice(change=change, command="tonnage ...", fits=True, changes_mathematics=False, **amounts)
    short = replace(estimates.full_card(), advice=(tried,))
    text = render(short)
    assert (wording.ADVICE_TITLE in text, wording.ADVICE_TITLE in page(short)) == (listed, listed)
    assert bool(render_suggestions(short)) is listed
    assert text.endswith("The first one again:\n  tonnage ...\n")
