"""What a question leaves closed unless it is said, and would make the best plan faster: priced, not run."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from tonnage.case import Case
from tonnage.errors import CannotEstimate
from tonnage.estimates.step_time import price
from tonnage.planner.solution import Candidate, Choice, Offer
from tonnage.search.space import Question
from tonnage.trainers import engine_of

_WORTH: Final = 0.03
"""Part of a step that an offer must save at least."""

_WHY: Final = {
    "layers": "torch.compile makes one kernel of what is between two products of a layer; not unasked, because it "
    "needs a compiler where you train and takes a minute at the start",
    "model": "torch.compile makes kernels of the network as a whole; not unasked, because it needs a compiler where "
    "you train and takes a minute or more at the start",
}


def offers(best: Choice, question: Question) -> tuple[Offer, ...]:
    """The kind of torch.compile that would save most of the best plan's step, where one would save some."""
    seconds = best.estimate.time.get("step_seconds")
    if seconds is None or not question.is_open("compile"):
        return ()
    found = [offer for offer in _compiled(best.candidate, question) if offer.step_seconds < (1 - _WORTH) * seconds]
    return tuple(sorted(found, key=lambda offer: offer.step_seconds)[:1])


def _compiled(best: Candidate, question: Question) -> Iterator[Offer]:
    for kind, why in _WHY.items():
        plan = replace(best.plan, compile=kind)
        if engine_of(plan).refusals(Case(best.job, plan, question.cluster)):
            continue
        try:
            known = price(Case(best.job, plan, question.cluster))
        except CannotEstimate:
            continue
        yield Offer(
            what=f"--compile {kind}",
            why=why,
            step_seconds=known.step_seconds,
            low_seconds=known.low_seconds,
            high_seconds=known.high_seconds,
        )
