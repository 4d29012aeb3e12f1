"""Decide candidates whose memory bound is rough, by few probes.

The bound of a network whose dimensions cannot be read, or of which a part is not known, rules out little.  Candidates
would be probed one after the other that need far too much; so those are probed first that decide about half of the
others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tonnage.planner.dominance import FEW, choose_most_informative, keep_open
from tonnage.planner.pricing import Priced
from tonnage.planner.probe import Need
from tonnage.units import format_gib

if TYPE_CHECKING:
    from tonnage.planner.search import Search


def decide_rough(search: Search, order: list[Priced]) -> None:
    """Probe candidates with rough bounds, of those given fastest first, until few of them are undecided.

    What does not fit is refused; what seems to fit is run later, in its turn.
    """
    pool = search.pool
    rough = [priced for priced in order if priced.is_rough]
    by_candidate = {id(priced.candidate): priced for priced in search.list_promising(rough)}
    undecided = [priced.candidate for priced in by_candidate.values()]
    while len(undecided) > FEW:
        candidate = choose_most_informative(undecided)
        priced = by_candidate[id(candidate)]
        (need,) = search.runner.probe([candidate], search.question.cluster)
        if not isinstance(need, Need):
            pool.tried.add(priced)
            search.refusals.add_failure(priced, need)
            undecided.remove(candidate)
            continue
        pool.expectation.add_probe(priced, need.uncached_bytes)
        is_small = need.uncached_bytes <= pool.capacity_bytes
        if not is_small:
            pool.tried.add(priced)
            search.refusals.add_too_large(priced, format_gib(need.process_bytes))
        undecided = keep_open(undecided, candidate, is_small)
