"""Rank candidates whose seconds are not known, by what they move to the host, exchange and recompute.

The time model does not know every network or card, but memory is known for all of them.  Without seconds, techniques
are ranked by their usual cost, and no number is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log2
from typing import TYPE_CHECKING, Any, Final

from tonnage.case import Case
from tonnage.cluster import Cluster
from tonnage.errors import CannotEstimate
from tonnage.estimates.step_time import price
from tonnage.planner.search_space import FILES, OFFLOADS, ORDER
from tonnage.planner.solution import Candidate

if TYPE_CHECKING:
    from tonnage.planner.pricing import Priced

RANKED: Final = "fewer bytes moved to the host, then exchanged within layers, then less run again"
"""The order, as reports print it."""


def rank_unpriced(unpriced: Iterable[Priced]) -> list[Priced]:
    """Return the candidates in the order of their cost, the cheapest first."""
    return sorted(unpriced, key=lambda priced: (rank_cost(priced.candidate), priced.bound_bytes))


def rank_cost(candidate: Candidate) -> tuple[Any, ...]:
    """Return a candidate's costs as a sort key, the most expensive kind first.

    Files; the link to the host, where synchronous copies cost more than those that overlap; exchanges that every
    layer waits for; recomputed layers; exchanges that may overlap; many small micro-batches; what is not the default.
    """
    job, plan = candidate.job, candidate.plan
    return (
        sum(getattr(plan, name) == FILES for name in OFFLOADS),
        sum(getattr(plan, name) != "none" for name in OFFLOADS),
        plan.activation_offload == "cpu",
        log2(plan.tp * plan.cp * plan.ep) + log2(plan.pp),
        _position("checkpointing", plan.checkpointing),
        plan.accum_sync,
        _position("shard", plan.shard),
        job.grad_accum,
        plan.optimizer_in_backward,
    )


def _position(name: str, value: Any) -> int:
    """Return a value's position in ORDER; one that is not in it comes last."""
    values: Sequence[Any] = ORDER[name]
    return values.index(value) if value in values else len(values)


def explain_unpriced(candidate: Candidate, cluster: Cluster) -> str | None:
    """Return why the time model cannot price a candidate; None if it can."""
    try:
        price(Case(candidate.job, candidate.plan, cluster))
    except CannotEstimate as reason:
        return str(reason)
    return None
