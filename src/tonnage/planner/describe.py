"""Describe candidates in words: `zero3, tp 2, checkpointing full; micro-batch 4 x 8`."""

from __future__ import annotations

from typing import Final

from tonnage.planner.search_space import AXES, OFFLOADS
from tonnage.planner.solution import Candidate
from tonnage.plans import Plan

_DEFAULT: Final = Plan()
_USUAL: Final = {"optimizer": ("adamw", "adamw-fused"), "precision": ("bf16-mixed", "fp16-mixed")}


def describe(candidate: Candidate, *, whole: bool = False, beside: Candidate | None = None) -> str:
    """Return how a candidate differs from a plain training loop, then its batch.

    `whole`: also say what nearly every plan has.  `beside`: a candidate that was described as a whole; what nearly
    every plan has is then said only where this candidate differs from it.
    """
    job, plan = candidate.job, candidate.plan
    known = _DEFAULT if whole else plan if beside is None else beside.plan
    words: list[str] = [] if job.method == "full" else [job.method]
    for name, usual in _USUAL.items():
        value = getattr(plan, name)
        differs = beside is not None and value != getattr(known, name)
        words += [value] if whole or differs or value not in usual else []
    words += [plan.shard] if plan.shard != _DEFAULT.shard else []
    words += [f"{name} {getattr(plan, name)}" for name in AXES if getattr(plan, name) > 1]
    words += ["interleaved"] if plan.pp > 1 and plan.pp_schedule == "interleaved" else []
    words += [f"checkpointing {plan.checkpointing}"] if plan.checkpointing != "none" else ["no checkpointing"]
    words += [_describe_sync(plan)] if plan.accum_sync else []
    words += ["optimizer in backward"] if plan.optimizer_in_backward else []
    words += [f"{name.replace('_', ' ')} {getattr(plan, name)}" for name in OFFLOADS if getattr(plan, name) != "none"]
    words += [f"compiled {plan.compile}"] if plan.compile != "none" else []
    words += [f"{plan.loss} loss"] if plan.loss != known.loss else []
    words += [f"{plan.attention} attention"] if plan.attention != known.attention else []
    words += [f"{plan.allocator} segments"] if plan.allocator != known.allocator else []
    return f"{', '.join(words)}; micro-batch {job.micro_batch} x {job.grad_accum}"


def _describe_sync(plan: Plan) -> str:
    """Return what happens to the gradients after each micro-batch."""
    return "gradients averaged each time" if plan.param_offload == "none" else "gradients to the host each time"
