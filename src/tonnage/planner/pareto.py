"""Pareto-optimal plans: no other is both faster and smaller."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from tonnage.planner.candidates import find_refusal
from tonnage.planner.pricing import Priced
from tonnage.planner.probe import Need
from tonnage.planner.question import Question
from tonnage.planner.solution import Choice, Point
from tonnage.planner.trial_runner import TrialRunner

MOST_POINTS: Final = 12
"""The most candidates that are probed for a frontier."""


def find_frontier(
    order: Sequence[Priced], shown: Sequence[Choice], question: Question, runner: TrialRunner
) -> tuple[Point, ...]:
    """Return the Pareto-optimal plans, fastest first, among probed candidates and the plans that are shown.

    Candidates are selected by the memory that they are likely to need, which orders them nearly as their peaks do;
    then their peaks decide.  Without seconds there is no frontier.
    """
    timed = [priced for priced in order if priced.timing is not None]
    if not timed:
        return ()
    selected = _select_evenly(list(_list_shrinking(timed, question)))
    answers = runner.probe([priced.candidate for priced in selected], question.cluster)
    budget = question.budget_bytes
    points = [_point_of_choice(choice, budget) for choice in shown]
    for priced, answer in zip(selected, answers, strict=True):
        run = runner.find_estimate(priced.candidate, question.cluster)
        if run is not None and run.fits_card:  # more exact than a probe
            points.append(_point_of_priced(priced, run.peak.process_bytes, budget, whole=True))
        elif isinstance(answer, Need):
            points.append(_point_of_priced(priced, answer.process_bytes, budget, whole=answer.whole))
    return tuple(_keep_optimal(points))


def _list_shrinking(order: Iterable[Priced], question: Question) -> Iterator[Priced]:
    """Yield the possible candidates that are likely to need less than every faster one."""
    least = float("inf")
    for priced in order:
        likely = priced.bound_bytes + priced.extra_bytes
        if likely < least and find_refusal(priced.candidate, question.cluster) is None:
            least = likely
            yield priced


def _select_evenly(candidates: Sequence[Priced]) -> list[Priced]:
    """Return up to MOST_POINTS candidates, evenly from the first to the last."""
    gaps = min(len(candidates), MOST_POINTS) - 1
    places = {round(place * (len(candidates) - 1) / max(gaps, 1)) for place in range(gaps + 1)}
    return [candidates[place] for place in sorted(places)]


def _keep_optimal(points: Iterable[Point]) -> Iterator[Point]:
    """Yield the points that need less than every one that is as fast."""
    least: float = float("inf")
    for point in sorted(points, key=lambda point: (point.step_seconds, point.process_bytes)):
        if point.process_bytes < least:
            least = point.process_bytes
            yield point


def _point_of_choice(choice: Choice, budget_bytes: int) -> Point:
    time = choice.estimate.time
    return Point(
        candidate=choice.candidate,
        process_bytes=choice.estimate.peak.process_bytes,
        whole=True,
        fits=choice.estimate.peak.process_bytes <= budget_bytes,
        step_seconds=time["step_seconds"],
        tokens_per_second_per_gpu=time["tokens_per_second_per_gpu"],
    )


def _point_of_priced(priced: Priced, process_bytes: int, budget_bytes: int, *, whole: bool) -> Point:
    assert priced.timing is not None
    return Point(
        candidate=priced.candidate,
        process_bytes=process_bytes,
        whole=whole,
        fits=process_bytes <= budget_bytes,
        step_seconds=priced.timing.step_seconds,
        tokens_per_second_per_gpu=priced.timing.tokens_per_second_per_gpu,
    )
