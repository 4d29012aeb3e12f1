"""How different two plans are as alternatives: by what a user would call another way to train."""

from __future__ import annotations

from typing import Final

from tonnage.planner.search_space import INTERVALS, OFFLOADS
from tonnage.planner.solution import Candidate

DIFFERENT: Final = 1.0
"""The least `difference` of two plans that are both shown."""

_AXIS_WEIGHTS: Final = {"tp": 1.0, "pp": 1.0, "ep": 1.0, "cp": 0.5}
"""The difference of using a parallel dimension or not."""

_SHARDED_PARTS: Final = {"zero1": 1, "zero2": 2, "zero3": 3, "hsdp": 3}
"""How many of states, gradients and weights are divided among the ranks."""


def difference(one: Candidate, other: Candidate) -> float:
    """Return how different two plans are.

    Another parallel dimension, sharding, checkpointing, arithmetic or offload counts; the degree of a dimension, the
    interval of checkpointed layers, the micro-batch and minor options do not.
    """
    plan, other_plan = one.plan, other.plan
    total = sum(
        weight
        for name, weight in _AXIS_WEIGHTS.items()
        if (getattr(plan, name) > 1) != (getattr(other_plan, name) > 1)
    )
    total += abs(_SHARDED_PARTS.get(plan.shard, 0) - _SHARDED_PARTS.get(other_plan.shard, 0)) / 2
    total += float(one.job.method != other.job.method)
    kinds = {plan.checkpointing, other_plan.checkpointing}
    total += float(len(kinds) == 2 and not kinds <= set(INTERVALS))
    names = ("precision", "optimizer", *OFFLOADS)
    return total + float(sum(getattr(plan, name) != getattr(other_plan, name) for name in names))


def is_alike(one: Candidate, other: Candidate) -> bool:
    """Return whether showing both plans would be showing one twice."""
    return difference(one, other) < DIFFERENT
