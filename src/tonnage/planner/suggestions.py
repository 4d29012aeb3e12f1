"""Suggest options that the search leaves closed and that would make the best plan faster: priced, not run."""

from collections.abc import Iterator
from typing import Final

from tonnage.case import Case
from tonnage.errors import CannotEstimate
from tonnage.estimates.step_time import price
from tonnage.options import replace_checked
from tonnage.planner.question import Question
from tonnage.planner.solution import Candidate, Choice, Offer
from tonnage.trainers import engine_of

_WORTH: Final = 0.03
"""The part of a step that a suggestion must save at least."""

_WHY: Final = {
    "layers": "torch.compile makes one kernel of what is between two products of a layer; not unasked, because it "
    "needs a compiler where you train and takes a minute at the start",
    "model": "torch.compile makes kernels of the network as a whole; not unasked, because it needs a compiler where "
    "you train and takes a minute or more at the start",
}


def suggest_options(best: Choice, question: Question) -> tuple[Offer, ...]:
    """Return the kind of torch.compile that would save most of the best plan's step, if one saves enough."""
    seconds = best.estimate.time.get("step_seconds")
    if seconds is None or not question.is_open("compile"):
        return ()
    offers = [
        offer for offer in _price_compiled(best.candidate, question) if offer.step_seconds < (1 - _WORTH) * seconds
    ]
    return tuple(sorted(offers, key=lambda offer: offer.step_seconds)[:1])


def _price_compiled(best: Candidate, question: Question) -> Iterator[Offer]:
    for kind, why in _WHY.items():
        plan = replace_checked(best.plan, {"compile": kind})
        if engine_of(plan).refusals(Case(best.job, plan, question.cluster)):
            continue
        try:
            timing = price(Case(best.job, plan, question.cluster))
        except CannotEstimate:
            continue
        yield Offer(
            what=f"--compile {kind}",
            why=why,
            step_seconds=timing.step_seconds,
            low_seconds=timing.low_seconds,
            high_seconds=timing.high_seconds,
        )
