"""Techniques that cost nothing are in every plan; those that cost the best one memory are taken back.

Looks at a few layers are too rough to say so: the plan without is run whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tonnage.estimates.estimate import Estimate
from tonnage.estimates.step_time import as_time
from tonnage.planner.solution import Candidate, Choice, Reason
from tonnage.search.best import fits
from tonnage.search.memory import Ghosts
from tonnage.search.pricing import priced
from tonnage.search.space import FREE_OPTIONS, Question, free

_ROUGH: Final = ("allocator",)
"""What looks say least of: how far blocks lie apart."""

_ROOMY: Final = 0.8
"""Part of the card up to which a plan leaves room; where it does not, one more run would be seconds for nothing."""


def without_useless(choice: Choice, question: Question, ghosts: Ghosts) -> Choice:
    """The choice without free techniques of which no look says enough and that cost memory.

    Of a plan that nearly fills the card it is not asked: there they are what they are for.
    """
    if choice.estimate.peak.process_bytes > _ROOMY * question.budget_bytes:
        return choice
    return _without(choice, [name for name in _ROUGH if _is_ours(name, choice, question)], question, ghosts)


def without_unwanted(choice: Choice, question: Question, ghosts: Ghosts) -> Choice:
    """The choice, of which there are reasons, without free techniques that by these cost memory and save no time."""
    useless = {one.technique.partition("=")[0] for one in choice.reasons if _costs_memory(one)}
    names = [name for name in FREE_OPTIONS if name in useless and _is_ours(name, choice, question)]
    return _without(choice, names, question, ghosts)


def _costs_memory(reason: Reason) -> bool:
    return reason.saves_bytes is not None and reason.saves_bytes < 0 and (reason.costs_seconds or 0.0) >= 0


def _is_ours(name: str, choice: Choice, question: Question) -> bool:
    """Whether the plan has the technique, and nobody asked for it."""
    plan, usual = choice.candidate.plan, getattr(question.plan, name)
    ours = free(choice.candidate.job, plan, question.cluster).get(name)
    return getattr(plan, name) == ours != usual and question.is_open(name) and question.may_be(name, usual)


def _without(choice: Choice, names: list[str], question: Question, ghosts: Ghosts) -> Choice:
    """Without each of these that the plan does not need more without."""
    for name in names:
        plan = replace(choice.candidate.plan, **{name: getattr(question.plan, name)})
        candidate = Candidate(job=choice.candidate.job, plan=plan)
        (run,) = ghosts.fit([candidate], question.cluster, choice.estimate.peak.process_bytes)
        if isinstance(run, Estimate) and fits(run, question) and _needs_less(run, choice.estimate):
            timing = priced(candidate, question.cluster).timing
            run = replace(run, time=choice.estimate.time if timing is None else as_time(timing))
            choice = replace(choice, candidate=candidate, estimate=run, reasons=())
    return choice


def _needs_less(run: Estimate, other: Estimate) -> bool:
    return run.peak.process_bytes < other.peak.process_bytes
