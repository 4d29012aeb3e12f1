"""The frontier of memory and speed: plans than which nothing is both faster and smaller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tonnage.errors import UsageError
from tonnage.predict import check
from tonnage.search.depth import Need
from tonnage.search.memory import Ghosts
from tonnage.search.pricing import Priced
from tonnage.search.space import Question
from tonnage.solution import Point

MOST_POINTS: Final = 12
"""Runs that a frontier is worth."""


def frontier(order: Sequence[Priced], question: Question, ghosts: Ghosts) -> tuple[Point, ...]:
    """Points of the frontier, fastest first, each run on a card where everything fits.

    Candidates are thinned by the least memory that they need, which orders them nearly as their peaks do; the peaks
    decide.
    """
    timed = [one for one in order if one.timing is not None]  # without seconds there is no frontier
    chosen = [one for one in _falling(timed) if _is_possible(one, question)]
    step = max(1, -(-len(chosen) // MOST_POINTS))
    chosen = chosen[::step]
    answers = ghosts.need([one.candidate for one in chosen], question.cluster)
    points: list[Point] = []
    for one, answer in zip(chosen, answers, strict=True):
        if not isinstance(answer, Need) or one.timing is None:
            continue
        if not points or answer.process_bytes < points[-1].process_bytes:
            points.append(
                Point(
                    candidate=one.candidate,
                    process_bytes=answer.process_bytes,
                    step_seconds=one.timing.step_seconds,
                    tokens_per_second_per_gpu=one.timing.tokens_per_second_per_gpu,
                )
            )
    return tuple(points)


def _falling(order: Sequence[Priced]) -> list[Priced]:
    """Those that need less than every faster one."""
    found: list[Priced] = []
    for one in order:
        if not found or one.least_bytes < found[-1].least_bytes:
            found.append(one)
    return found


def _is_possible(one: Priced, question: Question) -> bool:
    try:
        check(one.candidate.job, one.candidate.plan, question.cluster)
    except UsageError:
        return False
    return True
