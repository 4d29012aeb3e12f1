"""Candidates whose seconds nobody knows, in an order that needs none: what they move, run again and exchange.

The time model knows neither every network nor every card; memory is known of all of them.  Without seconds,
techniques are ranked as their costs are in general, and no number is given for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log2
from typing import TYPE_CHECKING, Any, Final

from tonnage.case import Case
from tonnage.cluster import Cluster
from tonnage.errors import CannotEstimate
from tonnage.estimates.step_time import price
from tonnage.planner.solution import Candidate
from tonnage.search.space import FILES, OFFLOADS, ORDER

if TYPE_CHECKING:
    from tonnage.search.pricing import Priced

RANKED: Final = "fewer bytes moved to the host, then exchanged within layers, then less run again"
"""The order, in words."""


def ranked(unpriced: Iterable[Priced]) -> list[Priced]:
    """All of them, what costs least first."""
    return sorted(unpriced, key=lambda one: (burden(one.candidate), one.least_bytes))


def burden(candidate: Candidate) -> tuple[Any, ...]:
    """What a candidate costs, the dearest first: files, the link to the host (copies that are waited for before those
    that run beside), exchanges that every layer waits for, layers that run again, exchanges that may run beside; then
    many small micro-batches, and what is not the default."""
    job, plan = candidate.job, candidate.plan
    return (
        sum(getattr(plan, name) == FILES for name in OFFLOADS),
        sum(getattr(plan, name) != "none" for name in OFFLOADS),
        plan.activation_offload == "cpu",
        log2(plan.tp * plan.cp * plan.ep) + log2(plan.pp),
        _place("checkpointing", plan.checkpointing),
        plan.accum_sync,
        _place("shard", plan.shard),
        job.grad_accum,
        plan.optimizer_in_backward,
    )


def _place(name: str, value: Any) -> int:
    """In the order of techniques, cheapest first; what is not in it is behind them."""
    values: Sequence[Any] = ORDER[name]
    return values.index(value) if value in values else len(values)


def unknown_because(candidate: Candidate, cluster: Cluster) -> str | None:
    """Why the time model says nothing of a candidate; None where it does."""
    try:
        price(Case(candidate.job, candidate.plan, cluster))
    except CannotEstimate as reason:
        return str(reason)
    return None
