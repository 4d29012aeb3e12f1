"""Take back what a plan does not need: a technique stays only if it earns time, the fit, or room.

The search gives every plan the free techniques, and of equally fast plans it may find the one with more techniques
first.  Here each technique is set back to its next cheaper value, and the plan is run whole: if it is no slower and
fits with `LEAST_FREE` left, that is the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from tonnage.estimates.estimate import Estimate
from tonnage.estimates.step_time import as_time
from tonnage.planner.fit import LEAST_FREE, fits
from tonnage.planner.pricing import price_candidate
from tonnage.planner.question import Question
from tonnage.planner.reasons import NO_TIME, Ablation, extra_seconds, list_ablations, measure_ablations
from tonnage.planner.search_space import FREE_OPTIONS
from tonnage.planner.solution import Choice
from tonnage.planner.trial_runner import TrialRunner

_MOST_ROUNDS: Final = 3
"""How often all techniques are looked at: without one of them another may have become superfluous."""


def take_back(choice: Choice, question: Question, runner: TrialRunner) -> Choice:
    """Return the plan without the techniques that earn nothing."""
    for _ in range(0 if runner.is_late else _MOST_ROUNDS):
        measured = measure_ablations(choice, question, runner)
        superfluous = [
            one.ablation.name
            for one in sorted(measured, key=lambda one: one.saved_bytes or 0)
            if one.may_fit(question) and _may_go(one.ablation, choice, question)
        ]
        simpler = _remove(choice, superfluous, question, runner)
        if simpler is choice:
            break
        choice = simpler
    return choice


def take_back_free(choices: Sequence[Choice], question: Question, runner: TrialRunner) -> list[Choice]:
    """Return alternatives without the free techniques that earn nothing; their others are not looked at."""
    return [_remove(choice, (*FREE_OPTIONS, "loss"), question, runner) for choice in choices]


def _remove(choice: Choice, names: Sequence[str], question: Question, runner: TrialRunner) -> Choice:
    """Return the choice without each of the techniques without which it is as good."""
    for name in names:
        ablation = next((one for one in list_ablations(choice.candidate, question) if one.name == name), None)
        if ablation is None or not _may_go(ablation, choice, question):
            continue
        (run,) = runner.run_whole([ablation.candidate], question.cluster, question.budget_bytes)
        if not isinstance(run, Estimate) or not fits(run, question) or not _has_room(run, choice):
            continue
        timing = price_candidate(ablation.candidate, question.cluster).timing
        if timing is None and run.peak.process_bytes >= choice.estimate.peak.process_bytes:
            continue  # what it earns in seconds is not known
        run = replace(run, time=choice.estimate.time if timing is None else as_time(timing))
        choice = replace(choice, candidate=ablation.candidate, estimate=run, reasons=())
    return choice


def _may_go(ablation: Ablation, choice: Choice, question: Question) -> bool:
    """Return whether the search may choose the cheaper value, and the plan is no slower with it."""
    name = ablation.name
    if not question.is_undecided(name) or not question.is_allowed(name, ablation.cheaper):
        return False
    costs = extra_seconds(choice, ablation.candidate, question)
    return costs is None or costs >= -NO_TIME * (choice.estimate.time["step_seconds"] or 0.0)


def _has_room(run: Estimate, choice: Choice) -> bool:
    """Return whether a run leaves LEAST_FREE of the card, or no less than the plan does."""
    most = run.cluster["capacity_bytes"] - LEAST_FREE
    return bool(run.peak.process_bytes <= max(most, choice.estimate.peak.process_bytes))
