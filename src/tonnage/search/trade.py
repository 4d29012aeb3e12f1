"""The frontier of memory and speed: plans than which nothing is both faster and smaller."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from tonnage.case import Case
from tonnage.errors import UsageError
from tonnage.planner.solution import Choice, Point
from tonnage.search.depth import Need
from tonnage.search.memory import Ghosts
from tonnage.search.pricing import Priced
from tonnage.search.space import Question
from tonnage.trainers.cases import check

MOST_POINTS: Final = 12
"""Runs that a frontier is worth."""


def frontier(
    order: Sequence[Priced], shown: Sequence[Choice], question: Question, ghosts: Ghosts
) -> tuple[Point, ...]:
    """Points of the frontier, fastest first, each run on a card where everything fits, plans that are shown too.

    Candidates are thinned by the memory that they are likely to need, which orders them nearly as their peaks do; the
    peaks decide.
    """
    timed = [one for one in order if one.timing is not None]  # without seconds there is no frontier
    if not timed:
        return ()
    chosen = _spread(list(_falling(timed, question)))
    answers = ghosts.need([one.candidate for one in chosen], question.cluster)
    budget = question.budget_bytes
    points = [_of_choice(choice, budget) for choice in shown]
    for one, answer in zip(chosen, answers, strict=True):
        run = ghosts.made(one.candidate, question.cluster)
        if run is not None and run.fits:  # which says more than a look
            points.append(_of_priced(one, run.peak.process_bytes, budget, whole=True))
        elif isinstance(answer, Need):
            points.append(_of_priced(one, answer.process_bytes, budget, whole=answer.whole))
    return tuple(_undominated(points))


def _falling(order: Iterable[Priced], question: Question) -> Iterator[Priced]:
    """Those that can be run and are likely to need less than every faster one."""
    least = float("inf")
    for one in order:
        likely = one.least_bytes + one.beyond_bytes
        if likely < least and _is_possible(one, question):
            least = likely
            yield one


def _spread(falling: Sequence[Priced]) -> list[Priced]:
    """As many as are worth a run, from the first to the last."""
    gaps = min(len(falling), MOST_POINTS) - 1
    places = {round(place * (len(falling) - 1) / max(gaps, 1)) for place in range(gaps + 1)}
    return [falling[place] for place in sorted(places)]


def _undominated(points: Iterable[Point]) -> Iterator[Point]:
    """Those that need less than all that are as fast."""
    least: float = float("inf")
    for point in sorted(points, key=lambda point: (point.step_seconds, point.process_bytes)):
        if point.process_bytes < least:
            least = point.process_bytes
            yield point


def _of_choice(choice: Choice, budget_bytes: int) -> Point:
    time = choice.estimate.time
    return Point(
        candidate=choice.candidate,
        process_bytes=choice.estimate.peak.process_bytes,
        whole=True,
        fits=choice.estimate.peak.process_bytes <= budget_bytes,
        step_seconds=time["step_seconds"],
        tokens_per_second_per_gpu=time["tokens_per_second_per_gpu"],
    )


def _of_priced(one: Priced, process_bytes: int, budget_bytes: int, *, whole: bool) -> Point:
    assert one.timing is not None
    return Point(
        candidate=one.candidate,
        process_bytes=process_bytes,
        whole=whole,
        fits=process_bytes <= budget_bytes,
        step_seconds=one.timing.step_seconds,
        tokens_per_second_per_gpu=one.timing.tokens_per_second_per_gpu,
    )


def _is_possible(one: Priced, question: Question) -> bool:
    try:
        check(Case(one.candidate.job, one.candidate.plan, question.cluster))
    except UsageError:
        return False
    return True
