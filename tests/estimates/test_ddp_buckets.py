"""DDP's first buckets in the upper end of the interval, if a step is too short to be sure that they are freed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from estimates import fitting
from tonnage.catalog.conventions import averages_by_ddp
from tonnage.catalog.devices import parse_cluster
from tonnage.estimates.ddp_buckets import SEEN, with_buckets, with_buckets_of_script
from tonnage.estimates.estimate import Estimate, PhasePeak
from tonnage.plans import Plan
from tonnage.units import GIB

TWO = parse_cluster("2xa100-80gb")
DDP = Plan(shard="ddp")


def averaging(low_seconds: float | None = 0.1, **job: Any) -> Estimate:
    """Return an estimate of 40 GiB in the optimizer; forward and backward take 38, 4 of them gradients in buckets."""
    found = fitting()
    held = {**found.peak.by_category, "communication": 4 * GIB}
    phases = tuple(
        PhasePeak(name=name, allocated_bytes=each * GIB, reserved_bytes=50 * GIB)
        for name, each in (("load", 10), ("forward", 37), ("backward", 38), ("optimizer", 40))
    )
    return replace(
        found,
        peak=replace(found.peak, allocated_bytes=40 * GIB, by_category=held, phase="optimizer"),
        phases=phases,
        job={"grad_accum": 1, **job},
        time={"step_seconds": low_seconds and 1.25 * low_seconds, "low_seconds": low_seconds},
    )


def test_the_upper_end_has_what_the_buckets_add_to_the_peak() -> None:
    before = averaging()
    after = with_buckets(before, DDP, TWO)
    assert after.peak.high_bytes - before.peak.high_bytes == (38 + 4 - 40) * GIB
    assert replace(after.peak, high_bytes=0) == replace(before.peak, high_bytes=0)
    said = after.coverage.assumed[-1]
    assert "a step of 0.12 s" in said
    assert "2.00 GiB higher" in said


def test_buckets_that_raise_no_peak_change_no_end() -> None:
    low = averaging()
    low = replace(low, phases=tuple(replace(each, allocated_bytes=30 * GIB) for each in low.phases))
    assert with_buckets(low, DDP, TWO) == low


def test_it_is_said_where_the_time_is_not_known() -> None:
    assert "whose time is not known" in with_buckets(averaging(None), DDP, TWO).coverage.assumed[-1]


@pytest.mark.parametrize(
    ("plan", "gpus", "said"),
    [
        (Plan(shard="ddp"), "2xa100-80gb", True),
        (Plan(shard="zero1"), "2xa100-80gb", True),
        (Plan(shard="ddp", engine="hf-trainer"), "2xa100-80gb", True),
        (Plan(shard="ddp", engine="deepspeed"), "2xa100-80gb", False),
        (Plan(shard="zero1", precision="megatron-bf16"), "2xa100-80gb", False),
        (Plan(shard="zero3"), "2xa100-80gb", False),
        (Plan(shard="ddp"), "a100-80gb", False),
        (Plan(shard="ddp", tp=2), "2xa100-80gb", False),
    ],
)
def test_only_torchs_ddp_on_several_ranks_has_such_buckets(plan: Plan, gpus: str, said: bool) -> None:
    before = averaging()
    assert (with_buckets(before, plan, parse_cluster(gpus)) != before) == said


@pytest.mark.parametrize(("low_seconds", "grad_accum", "said"), [(0.19, 1, True), (0.2, 1, False), (0.4, 4, True)])
def test_a_long_step_is_certain(low_seconds: float, grad_accum: int, said: bool) -> None:
    before = averaging(low_seconds, grad_accum=grad_accum)
    assert (with_buckets(before, DDP, TWO) != before) == said


@pytest.mark.parametrize(
    ("module", "gpus", "said"),
    [
        ("torch.nn.parallel.distributed", 2, True),
        ("torch.nn.parallel.distributed", 1, False),
        ("megatron.core.distributed.distributed_data_parallel", 2, False),
        ("transformers.models.llama.modeling_llama", 2, False),
    ],
)
def test_of_a_script_the_networks_class_tells(module: str, gpus: int, said: bool) -> None:
    before = averaging(None)
    before = replace(before, model={**before.model, "module": module}, cluster={**before.cluster, "gpus": gpus})
    after = with_buckets_of_script(before)
    assert (after.peak.high_bytes - before.peak.high_bytes) == (2 * GIB if said else 0)
    assert (after.coverage != before.coverage) == said


def test_how_often_buckets_were_held_is_what_the_records_have() -> None:
    """In a second step that holds them, forward and backward peak higher than in the third."""
    recorded = [
        json.loads(line)
        for path in sorted((Path(__file__).parents[2] / "measurements").glob("h?00-20*[0-9b].jsonl"))
        for line in path.read_text().splitlines()
    ]
    averaged = [
        one["steps"]
        for one in recorded
        if one.get("plan", {}).get("shard") in ("ddp", "zero1") and averages_by_ddp(Plan(**one["plan"]))
    ]
    peaks = [[max(p["allocated_bytes"] for p in step["phases"].values()) for step in steps] for steps in averaged]
    held = sum(second > 1.01 * third for _, second, third in peaks)
    assert f"{held} of {len(averaged)} that were recorded" == SEEN
