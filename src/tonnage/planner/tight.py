"""Plans that nearly fill the card: one that fits only inside the headroom, and one that is hardly faster for it.

What fits the card but not the card less its headroom is no plan that a search finds; where it is faster than what the
search finds, or nothing else fits, it is shown as what it is, with the seconds that the headroom costs.  A plan that
leaves less than `LEAST_FREE` loses to one that leaves more and is slower by less than `FASTER`.
"""

from __future__ import annotations

from itertools import islice, takewhile
from math import inf
from typing import TYPE_CHECKING, Final

from tonnage.estimates.estimate import Estimate
from tonnage.planner.fit import LEAST_FREE, Fitting, fits

if TYPE_CHECKING:
    from tonnage.planner.pricing import Priced
    from tonnage.planner.search import Search

FASTER: Final = 0.03
"""The part of a step's seconds by which a plan must be faster to be worth a card that is nearly full."""

_MOST_RUNS: Final = 3
"""Candidates that are run for either plan."""


def find_barely_fitting(search: Search) -> Fitting | None:
    """Return the fastest known plan that fits only inside the headroom, if it is worth it; else None."""
    if search.runner.is_late:
        return None
    capacity, known = search.question.cluster.device.capacity_bytes, set(search.near)
    limit = (1 - FASTER) * search.found[0].priced.seconds_per_token if search.found else inf
    faster = takewhile(lambda one: _seconds(one) < limit, search.pool.order)
    untried = (one for one in faster if one not in search.pool.tried)
    expectation = search.pool.expectation
    hopeful = [one for one in untried if expectation.bytes(one) * (1 - expectation.error(one)) <= capacity]
    expected = islice(filter(search.pool.is_possible, sorted(hopeful, key=expectation.bytes)), _MOST_RUNS)
    candidates = {one for one in (*search.near, *expected) if _seconds(one) < limit}
    for priced in sorted(candidates, key=lambda one: (_seconds(one), one not in known))[:_MOST_RUNS]:
        run = _run(search, priced)
        if run is not None and run.fits:
            return Fitting(priced, run)
    return None


def prefer_room(search: Search) -> bool:
    """Put a plan with room before one that nearly fills the card and is hardly faster; return whether it does."""
    capacity = search.question.cluster.device.capacity_bytes
    if not search.found or capacity - search.found[0].estimate.peak.process_bytes >= LEAST_FREE:
        return False
    first, tried = search.found[0], 0
    for priced in search.pool.order:
        if _seconds(priced) > (1 + FASTER) * _seconds(first.priced) or tried == _MOST_RUNS:
            return False
        if search.pool.expectation.bytes(priced) > capacity - LEAST_FREE or not search.pool.is_possible(priced):
            continue
        tried += 1
        run = _run(search, priced)
        if run is not None and fits(run, search.question) and capacity - run.peak.process_bytes >= LEAST_FREE:
            others = [one for one in search.found if one.priced is not priced]
            search.found = [Fitting(priced, run), *others][: max(len(search.found), 2)]
            return True
    return False


def _run(search: Search, priced: Priced) -> Estimate | None:
    """Return the whole run of a candidate on the card; None if it cannot be run."""
    (run,) = search.runner.run_whole([priced.candidate], search.question.cluster)
    return run if isinstance(run, Estimate) else None


def _seconds(priced: Priced) -> float:
    return priced.seconds_per_token
