"""Descriptions of candidates."""

from dataclasses import replace

from networks import tiny_job
from tonnage.planner.describe import describe
from tonnage.planner.solution import Candidate
from tonnage.plans import Plan

PLAN = Plan(optimizer="adamw-fused", shard="zero3", loss="chunked", allocator="expandable")
BEST = Candidate(job=tiny_job("llama", micro_batch=2, grad_accum=4), plan=PLAN)


def other(**changes: str) -> Candidate:
    return replace(BEST, plan=replace(PLAN, **changes))


def test_usual_values_are_only_in_the_whole_description() -> None:
    assert describe(BEST) == "zero3, no checkpointing; micro-batch 2 x 4"
    assert describe(BEST, whole=True) == (
        "adamw-fused, bf16-mixed, zero3, no checkpointing, chunked loss, expandable segments; micro-batch 2 x 4"
    )


def test_differences_from_another_candidate_are_described() -> None:
    assert describe(BEST, beside=BEST) == describe(BEST)
    assert describe(other(loss="plain"), beside=BEST) == "zero3, no checkpointing, plain loss; micro-batch 2 x 4"
    assert describe(other(optimizer="adamw"), beside=BEST) == "adamw, zero3, no checkpointing; micro-batch 2 x 4"
    assert describe(other(allocator="default"), beside=BEST).endswith(
        "no checkpointing, default segments; micro-batch 2 x 4"
    )


def test_unusual_values_are_always_described() -> None:
    assert describe(other(optimizer="adamw-8bit"), beside=other(optimizer="adamw-8bit")).startswith(
        "adamw-8bit, zero3"
    )
