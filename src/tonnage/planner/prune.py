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
from tonnage.planner.reasons import NO_TIME, Ablation, Measured, extra_seconds, list_ablations, measure_ablations
from tonnage.planner.search_space import FREE_OPTIONS
from tonnage.planner.solution import Candidate, Choice
from tonnage.planner.trial_runner import Failure, TrialRunner

_MOST_ROUNDS: Final = 3
"""How often all techniques are looked at: without one of them another may have become superfluous."""


_MOST_GPUS: Final = 8
"""GPUs up to which alternatives are looked at."""


def take_back(choice: Choice, question: Question, runner: TrialRunner) -> Choice:
    """Return the plan without the techniques that earn nothing."""
    for _ in range(0 if runner.is_late else _MOST_ROUNDS):
        measured = measure_ablations(choice, question, runner)
        may_go = [one for one in measured if one.may_fit(question) and _may_go(one.ablation, choice, question)]
        superfluous = _list_together(may_go, choice, question)
        (simpler,) = _remove_all([choice], superfluous, question, runner)
        if simpler is choice and len(superfluous) > 1:  # each may go, but not all of them
            for name in superfluous:
                (simpler,) = _remove_all([simpler], [name], question, runner)
        if simpler is choice:
            break
        choice = simpler
    return choice


def _list_together(measured: Sequence[Measured], choice: Choice, question: Question) -> list[str]:
    """Return the techniques, those that save least first, without all of which the plan may still fit."""
    names, needed = [], choice.estimate.peak.process_bytes
    for one in sorted(measured, key=lambda one: one.saved_bytes or 0):
        needed += one.saved_bytes or 0
        if needed <= question.budget_bytes:
            names.append(one.ablation.name)
    return names


def take_back_free(choices: Sequence[Choice], question: Question, runner: TrialRunner) -> list[Choice]:
    """Return alternatives without the free techniques, where these earn nothing; their others are not looked at.

    On many GPUs, where each run takes a second or more, they stay as they were found.
    """
    if runner.is_late or question.cluster.gpus > _MOST_GPUS:
        return list(choices)
    return _remove_all(choices, FREE_OPTIONS, question, runner)


def _remove_all(
    choices: Sequence[Choice], names: Sequence[str], question: Question, runner: TrialRunner
) -> list[Choice]:
    """Return the choices without those of these techniques that may go, where a choice is as good without them."""
    candidates = [_set_back(choice, names, question) for choice in choices]
    changed = [one for one, choice in zip(candidates, choices, strict=True) if one != choice.candidate]
    runs = iter(runner.run_whole(changed, question.cluster, question.budget_bytes))
    return [
        choice if candidate == choice.candidate else _choose(choice, candidate, next(runs), question)
        for candidate, choice in zip(candidates, choices, strict=True)
    ]


def _set_back(choice: Choice, names: Sequence[str], question: Question) -> Candidate:
    """Return the plan of a choice with the next cheaper value of these techniques, of those that may go."""
    for name in names:
        ablations = list_ablations(choice.candidate, question)
        ablation = next((one for one in ablations if one.name == name), None)
        if ablation is not None and _may_go(ablation, choice, question):
            choice = replace(choice, candidate=ablation.candidate)
    return choice.candidate


def _choose(choice: Choice, candidate: Candidate, run: Estimate | Failure, question: Question) -> Choice:
    """Return the choice with a simpler plan, if its run fits and leaves room; else as it is."""
    if not isinstance(run, Estimate) or not fits(run, question) or not _has_room(run, choice):
        return choice
    timing = price_candidate(candidate, question.cluster).timing
    if timing is None and run.peak.process_bytes >= choice.estimate.peak.process_bytes:
        return choice  # what the techniques earn in seconds is not known
    run = replace(run, time=choice.estimate.time if timing is None else as_time(timing))
    return replace(choice, candidate=candidate, estimate=run, reasons=())


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
