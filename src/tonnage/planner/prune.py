"""Remove free techniques that cost the best plan memory.

Every plan has the free techniques.  Probes of a few layers are too rough to show that one of them costs memory, so
the plan without it is run whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tonnage.estimates.estimate import Estimate
from tonnage.estimates.step_time import as_time
from tonnage.planner.candidates import free_choices
from tonnage.planner.fit import fits
from tonnage.planner.pricing import price_candidate
from tonnage.planner.question import Question
from tonnage.planner.search_space import FREE_OPTIONS
from tonnage.planner.solution import Candidate, Choice, Reason
from tonnage.planner.trial_runner import TrialRunner

_ROUGH: Final = ("allocator",)
"""Techniques of which probes say least: how far blocks lie apart."""

_ROOMY: Final = 0.8
"""The part of the card up to which a plan has room; a fuller one needs these techniques, and is not run again."""


def prune_rough(choice: Choice, question: Question, runner: TrialRunner) -> Choice:
    """Return the choice without the free techniques that cost memory, of those that probes do not show."""
    if choice.estimate.peak.process_bytes > _ROOMY * question.budget_bytes:
        return choice
    names = [name for name in _ROUGH if _is_ours(name, choice, question)]
    return _remove(choice, names, question, runner)


def prune_useless(choice: Choice, question: Question, runner: TrialRunner) -> Choice:
    """Return the choice without the free techniques that, by its reasons, cost memory and save no time."""
    useless = {reason.technique.partition("=")[0] for reason in choice.reasons if _costs_memory(reason)}
    names = [name for name in FREE_OPTIONS if name in useless and _is_ours(name, choice, question)]
    return _remove(choice, names, question, runner)


def _costs_memory(reason: Reason) -> bool:
    return reason.saves_bytes is not None and reason.saves_bytes < 0 and (reason.costs_seconds or 0.0) >= 0


def _is_ours(name: str, choice: Choice, question: Question) -> bool:
    """Return whether the plan has a free technique that nobody asked for."""
    plan, default = choice.candidate.plan, getattr(question.plan, name)
    ours = free_choices(choice.candidate.job, plan, question.cluster).get(name)
    return getattr(plan, name) == ours != default and question.is_open(name) and question.is_allowed(name, default)


def _remove(choice: Choice, names: list[str], question: Question, runner: TrialRunner) -> Choice:
    """Return the choice without each of the techniques whose removal makes it smaller."""
    for name in names:
        plan = replace(choice.candidate.plan, **{name: getattr(question.plan, name)})
        candidate = Candidate(job=choice.candidate.job, plan=plan)
        (run,) = runner.run_whole([candidate], question.cluster, choice.estimate.peak.process_bytes)
        if isinstance(run, Estimate) and fits(run, question) and _is_smaller(run, choice.estimate):
            timing = price_candidate(candidate, question.cluster).timing
            run = replace(run, time=choice.estimate.time if timing is None else as_time(timing))
            choice = replace(choice, candidate=candidate, estimate=run, reasons=())
    return choice


def _is_smaller(run: Estimate, other: Estimate) -> bool:
    return run.peak.process_bytes < other.peak.process_bytes
