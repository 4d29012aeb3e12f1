"""Seconds of plans that were found for a network whose dimensions do not say them: a step of each is counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tonnage.case import Case
from tonnage.cluster import Cluster
from tonnage.estimates.step_time import is_better_seen, played
from tonnage.planner.solution import Candidate, Choice
from tonnage.search.memory import Ghosts
from tonnage.search.space import Question
from tonnage.search.words import describe

_FEW = 2
"""Micro-batches of a step that is counted at the most: what each further one takes follows."""


def with_seconds(
    choices: Sequence[Choice], ghosts: Ghosts, question: Question, say: Callable[[str], None]
) -> list[Choice]:
    """The choices, with seconds where they had none and steps can be counted; if all have them, fastest first."""
    cluster, found = question.cluster, []
    for choice in choices:
        if choice.estimate.time["step_seconds"] is None and _is_counted(choice.candidate, cluster):
            say("counting the operations of a step of each plan, for its seconds")
            choice = replace(choice, estimate=replace(choice.estimate, time=_time(choice, ghosts, cluster)))
        found.append(choice)
    if len(found) < 2 or not all(_is_counted(one.candidate, cluster) and _rate(one) for one in found):
        return found
    best, *others = sorted(found, key=_rate, reverse=True)
    return [replace(best, name="best"), *(replace(one, name=describe(one.candidate)) for one in others)]


def _rate(choice: Choice) -> float:
    """Tokens a second; 0 where they are not known."""
    return choice.estimate.time["tokens_per_second_per_gpu"] or 0.0


def _is_counted(candidate: Candidate, cluster: Cluster) -> bool:
    return is_better_seen(Case(candidate.job, candidate.plan, cluster))


def _time(choice: Choice, ghosts: Ghosts, cluster: Cluster) -> dict[str, Any]:
    """Of the choice's step; of many micro-batches from steps of one and of two."""
    each = choice.candidate.job.grad_accum
    if each <= _FEW:
        return _counted(choice, ghosts, cluster, each)
    one, two = (_counted(choice, ghosts, cluster, count) for count in (1, 2))
    if one["step_seconds"] is None or two["step_seconds"] is None:
        return one
    names = ("step_seconds", "low_seconds", "high_seconds")
    seconds = {name: one[name] + (each - 1) * (two[name] - one[name]) for name in names}
    part = each * one["step_seconds"] / seconds["step_seconds"]
    rates = {name: one[name] * part for name in ("tokens_per_second_per_gpu", "mfu")}
    return {**two, **seconds, **rates}


def _counted(choice: Choice, ghosts: Ghosts, cluster: Cluster, micro_batches: int) -> dict[str, Any]:
    job = replace(choice.candidate.job, grad_accum=micro_batches)
    worked = ghosts.worked(replace(choice.candidate, job=job), cluster)
    if worked is None:
        return choice.estimate.time
    return played(choice.estimate, [worked], cluster, job, choice.candidate.plan).time
