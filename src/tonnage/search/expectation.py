"""What runs say of candidates that were not run: interpolation between traces.

The least memory of a candidate is known, and how much more than theirs runs like it needed.
"""

from __future__ import annotations

from math import log
from typing import Any

from tonnage.search.pricing import Priced
from tonnage.search.space import AXES, OFFLOADS

_OTHER_AXIS = 0.3
"""How far apart two runs are for each parallel dimension in which they differ, in the scale of log(tokens)."""


class Expectation:
    """Runs so far, by what decides how far a need is above the least."""

    def __init__(self) -> None:
        self._runs: dict[tuple[Any, ...], list[tuple[Priced, float]]] = {}

    def learn(self, one: Priced, need_bytes: int) -> None:
        """Note what a candidate was found to need."""
        self._runs.setdefault(_like(one), []).append((one, float(need_bytes)))

    def bytes(self, one: Priced) -> float:
        """What a candidate is expected to need: its least, and what the nearest run like it needed beyond its own.

        That part is taken to grow as the tokens do that a rank computes at once.
        """
        runs = self._runs.get(_like(one))
        if not runs:
            return float(one.least_bytes)
        nearest, need = min(runs, key=lambda run: _apart(one, run[0]))
        return one.least_bytes + (need - nearest.least_bytes) * one.tokens_at_once / nearest.tokens_at_once


def _like(one: Priced) -> tuple[Any, ...]:
    job, plan = one.candidate.job, one.candidate.plan
    return (
        job.method,
        plan.shard,
        plan.precision,
        plan.loss,
        plan.optimizer,
        plan.checkpointing,
        plan.optimizer_in_backward,
        plan.accum_sync or job.grad_accum == 1,
        *(getattr(plan, name) for name in OFFLOADS),
    )


def _apart(one: Priced, other: Priced) -> float:
    axes: int = sum(getattr(one.candidate.plan, name) != getattr(other.candidate.plan, name) for name in AXES)
    return abs(log(one.tokens_at_once / other.tokens_at_once)) + _OTHER_AXIS * axes
