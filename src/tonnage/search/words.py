"""Candidates in words."""

from __future__ import annotations

from typing import Final

from tonnage.plans import Plan
from tonnage.search.space import AXES, OFFLOADS
from tonnage.solution import Candidate

_PLAIN: Final = Plan()
_USUAL: Final = {"optimizer": ("adamw", "adamw-fused"), "precision": ("bf16-mixed", "fp16-mixed")}


def describe(candidate: Candidate, *, whole: bool = False) -> str:
    """What differs from a plain loop, then the batch; with `whole` also what nearly every plan has."""
    job, plan = candidate.job, candidate.plan
    words = [] if job.method == "full" else [job.method]
    words += [getattr(plan, name) for name, usual in _USUAL.items() if whole or getattr(plan, name) not in usual]
    words += [plan.shard] if plan.shard != _PLAIN.shard else []
    words += [f"{name} {getattr(plan, name)}" for name in AXES if getattr(plan, name) > 1]
    words += ["interleaved"] if plan.pp > 1 and plan.pp_schedule == "interleaved" else []
    words += [f"checkpointing {plan.checkpointing}"] if plan.checkpointing != "none" else ["no checkpointing"]
    words += ["gradients averaged each time"] if plan.accum_sync else []
    words += ["optimizer in backward"] if plan.optimizer_in_backward else []
    words += [f"{name.replace('_', ' ')} {getattr(plan, name)}" for name in OFFLOADS if getattr(plan, name) != "none"]
    if whole:
        words += [f"{plan.loss} loss"] if plan.loss != _PLAIN.loss else []
        words += [f"{plan.allocator} segments"] if plan.allocator != _PLAIN.allocator else []
    return f"{', '.join(words)}; micro-batch {job.micro_batch} x {job.grad_accum}"
