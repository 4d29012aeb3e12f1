"""Sentences and rows that all views share."""

from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import estimates
from tonnage.estimates.estimate import CATEGORIES, StepPeak, capacity_bytes
from tonnage.plans import Plan
from tonnage.report import wording
from tonnage.report.palette import LOOKS, OTHERS
from tonnage.shallow import continuing
from tonnage.step import step
from tonnage.techniques import fsdp


def test_every_category_has_a_look():
    assert tuple(name for name in LOOKS if name != "graphs") == CATEGORIES, "an engine has its graphs beside them"
    for part in ("label", "colour", "glyph", "letter"):
        assert len({getattr(look, part) for look in (*LOOKS.values(), OTHERS)}) == len(LOOKS) + 1


def test_shares_sum_to_the_process():
    estimate = estimates.full_card()
    assert sum(share.bytes for share in wording.shares(estimate)) == estimate.peak.process_bytes


def test_command_is_shown_as_typed():
    estimate = replace(estimates.scripted(), job={"command": ["bash", "-c", "python train.py; true"]})
    assert wording.subject(estimate) == "bash -c 'python train.py; true'"


def test_memory_of_other_processes_is_not_free():
    estimate = estimates.scripted()
    own, capacity = estimate.peak.process_bytes, capacity_bytes(estimate)
    assert capacity is not None
    processes = (
        {"process": 7, "rank": estimate.rank, "held_bytes": 3 * 2**30, "peak_bytes": own + 2**30},
        {"process": 8, "rank": estimate.rank, "held_bytes": own // 2, "peak_bytes": own},
        {"process": 9, "rank": None, "held_bytes": 2**30, "peak_bytes": 2**30},
    )
    shared = replace(estimate, cards=({"index": 0, "peak_bytes": own + 4 * 2**30, "processes": processes},))
    assert shared.others_bytes == 4 * 2**30
    assert wording.free_bytes(shared) == max(wording.free_bytes(estimate) - 4 * 2**30, 0)
    assert "beside 4.00 GiB of other processes" in wording.need(shared)
    assert estimate.others_bytes == 0


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        ({"gpu": "t4", "gpus": 1, "nodes": 1}, "t4"),
        ({"gpu": "t4", "gpus": 8, "nodes": 1}, "8 x t4"),
        ({"gpu": "t4", "gpus": 16, "nodes": 2}, "2 x 8 x t4"),
        ({}, "GPU"),
    ],
)
def test_card(cluster, expected):
    assert wording.card(replace(estimates.fitting(), cluster=cluster)) == expected


def test_choices_omit_options_without_effect():
    assert wording.choices(estimates.fitting()) == "full, 1 x 4,096 tokens, bf16-true, adamw, checkpointing full"
    pictures = replace(estimates.fitting(), model={**estimates.fitting().model, "words": False})
    assert wording.choices(pictures) == "full, 1 sample, bf16-true, adamw, checkpointing full"
    assert wording.choices(estimates.scripted()) == "6.74 B parameters, 20 M trainable"


@given(st.sets(st.integers(0, 60)))
def test_spans_name_each_number_once(numbers):
    named: list[int] = []
    for part in filter(None, wording.spans(numbers).split(", ")):
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(numbers)


def test_frames_keep_the_users_own_and_the_innermost_ones():
    library = [f"/env/site-packages/torch/a.py:{line} f" for line in range(20)]
    stack = ("/home/ada/train.py:1 main", *library[:10], "/home/ada/model.py:2 forward", *library[10:])
    assert wording.frames(stack) == [
        "/home/ada/train.py:1 main",
        "... 10 frames left out",
        "/home/ada/model.py:2 forward",
        "... 6 frames left out",
        *(f"torch/a.py:{line} f" for line in range(16, 20)),
    ]


def test_frames_omit_module_calls():
    call = "/env/lib/python3.11/site-packages/torch/nn/modules/module.py:1884 _call_impl"
    stack = ("/cache/tonnage/torch-2.13.0-cp311/torch/nn/modules/linear.py:1 forward", call, "train.py:2 main", call)
    assert wording.frames(stack) == [
        "torch/nn/modules/linear.py:1 forward",
        "... 1 frame left out",
        "train.py:2 main",
    ]


def test_short_stack_is_shown_whole():
    assert wording.frames(("a:1 f", "b:2 g")) == ["a:1 f", "b:2 g"]
    assert wording.frames(()) == []


def test_peaks_of_the_first_and_later_steps():
    assert wording.first_and_later(estimates.fitting()) == []
    steps = [StepPeak(step=n, allocated_bytes=a, reserved_bytes=r) for n, a, r in ((1, 5, 9), (2, 8, 10), (3, 7, 12))]
    first, later = wording.first_and_later(replace(estimates.fitting(), steps=tuple(steps)))
    assert (first.name, first.allocated_bytes, first.reserved_bytes) == ("first step", 5, 9)
    assert (later.name, later.allocated_bytes, later.reserved_bytes) == ("later steps", 8, 12)


def test_switch_is_named_when_it_is_set():
    plan = {**estimates.fitting().plan, "optimizer_in_backward": True, "accum_sync": False}
    choices = wording.choices(replace(estimates.fitting(), plan=plan))
    assert "optimizer in backward" in choices
    assert "True" not in choices
    assert "accum sync" not in choices


def test_default_plan_shows_precision_and_optimizer() -> None:
    choices = wording.choices(replace(estimates.fitting(), plan=asdict(Plan())))
    assert choices.endswith("bf16-mixed, adamw")


def test_frames_of_a_checkout_are_not_the_users():
    mine = "/home/ada/train.py:1 main"
    ours = [f"{module.__file__}:1 f" for module in (step, fsdp, continuing)]
    checkout = [
        f"/home/ada/src/tonnage/{path}.py:1 f" for path in ("step/step", "techniques/fsdp", "shallow/continuing")
    ]
    assert wording.frames((mine, *ours))[0] == wording.frames((mine, *checkout))[0] == mine
    for stack in (ours, checkout):
        assert wording.frames(tuple(stack)) == [
            "tonnage/step/step.py:1 f",
            "tonnage/techniques/fsdp.py:1 f",
            "tonnage/shallow/continuing.py:1 f",
        ]


def test_drawn_lengths_are_shown_by_the_longest():
    estimate = estimates.fitting()
    drawn = replace(estimate, job={**estimate.job, "seq_len": 4096, "micro_batch": 2, "lengths": ["512", "1024"]})
    assert "2 x up to 1,024 tokens" in wording.choices(drawn)
    assert "4,096" not in wording.choices(drawn)


@pytest.mark.parametrize("lengths", [7, "512", {"a": 1}, ["²"], ["9" * 5000], [None], [True], []])
def test_invalid_lengths_of_a_file_are_ignored(lengths):
    estimate = estimates.fitting()
    odd = replace(estimate, job={**estimate.job, "seq_len": 4096, "micro_batch": 2, "lengths": lengths})
    assert "2 x 4,096 tokens" in wording.choices(odd)


def test_card_too_small_for_memory_outside_pytorch():
    estimate = estimates.full_card()
    peak = replace(estimate.peak, process_bytes=3 * 10**9)
    need = wording.need(replace(estimate, peak=peak, cluster={**estimate.cluster, "capacity_bytes": 10**8}))
    assert "the process would take 2.79 GiB of 0.09 GiB" in need
