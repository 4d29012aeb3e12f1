"""Add seconds to plans for networks that the time model cannot price, by counting the operations of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from tonnage.case import Case
from tonnage.cluster import Cluster
from tonnage.estimates.step_time import add_counted_time, needs_counting
from tonnage.planner.describe import describe
from tonnage.planner.question import Question
from tonnage.planner.solution import Candidate, Choice
from tonnage.planner.trial_runner import TrialRunner

_MOST_COUNTED: Final = 2
"""The most micro-batches that are counted; each further one takes as long as the second."""


def add_seconds(
    choices: Sequence[Choice], runner: TrialRunner, question: Question, progress: Callable[[str], None]
) -> list[Choice]:
    """Return the choices, with seconds where they had none and steps can be counted; fastest first if all have."""
    cluster, timed = question.cluster, []
    for choice in choices:
        if choice.estimate.time["step_seconds"] is None and _is_countable(choice.candidate, cluster):
            progress("counting the operations of a step of each plan, for its seconds")
            time = _measure_time(choice, runner, cluster)
            choice = replace(choice, estimate=replace(choice.estimate, time=time))
        timed.append(choice)
    if len(timed) < 2 or not all(_is_countable(one.candidate, cluster) and _tokens_per_second(one) for one in timed):
        return timed
    best, *others = sorted(timed, key=_tokens_per_second, reverse=True)
    return [replace(best, name="best"), *(replace(choice, name=describe(choice.candidate)) for choice in others)]


def _tokens_per_second(choice: Choice) -> float:
    """Return the tokens a second; 0 if they are not known."""
    return choice.estimate.time["tokens_per_second_per_gpu"] or 0.0


def _is_countable(candidate: Candidate, cluster: Cluster) -> bool:
    return needs_counting(Case(candidate.job, candidate.plan, cluster))


def _measure_time(choice: Choice, runner: TrialRunner, cluster: Cluster) -> dict[str, Any]:
    """Return the time of a choice's step; with many micro-batches, from steps of one and of two."""
    micro_batches = choice.candidate.job.grad_accum
    if micro_batches <= _MOST_COUNTED:
        return _count_step(choice, runner, cluster, micro_batches)
    one, two = (_count_step(choice, runner, cluster, count) for count in (1, 2))
    if one["step_seconds"] is None or two["step_seconds"] is None:
        return one
    names = ("step_seconds", "low_seconds", "high_seconds")
    seconds = {name: one[name] + (micro_batches - 1) * (two[name] - one[name]) for name in names}
    part = micro_batches * one["step_seconds"] / seconds["step_seconds"]
    rates = {name: one[name] * part for name in ("tokens_per_second_per_gpu", "mfu")}
    return {**two, **seconds, **rates}


def _count_step(choice: Choice, runner: TrialRunner, cluster: Cluster, micro_batches: int) -> dict[str, Any]:
    job = replace(choice.candidate.job, grad_accum=micro_batches)
    operations = runner.count_operations(replace(choice.candidate, job=job), cluster)
    if operations is None:
        return choice.estimate.time
    return add_counted_time(choice.estimate, [operations], cluster, job, choice.candidate.plan).time
