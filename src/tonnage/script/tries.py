"""Complete the dry-run of a script that does not fit: what all of its steps need, and settings that were tried.

The script is run once more on cards without a limit.  If it can be read as a Job under a Plan, changes are tried in
tonnage's own process first (`tonnage.advice`), and those that fit there are tried on the script itself; else the
rungs of the ladder are.  What is shown was run by the script.
"""

from __future__ import annotations

import itertools
import shlex
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from tonnage.advice.advise import WORKERS
from tonnage.advice.changes import Change as Options
from tonnage.advice.changes import apply
from tonnage.advice.hardware import list_cards
from tonnage.advice.trials import Trials
from tonnage.advice.trials import Tried as TriedOptions
from tonnage.case import Case
from tonnage.catalog.devices import spell_options
from tonnage.errors import TonnageError, TrialFailed
from tonnage.estimates.estimate import Advice, Estimate
from tonnage.estimates.from_traces import Run
from tonnage.planner.solution import Candidate
from tonnage.planner.trial_runner import TrialRunner
from tonnage.script import dry_run, engine_advice
from tonnage.script.facts import Facts, NotUnderstood, Understood, understood
from tonnage.script.ladder import list_rungs, may_suffice
from tonnage.script.planning import Asked, Tried, can_set_batch, can_shard, has_no_setting, try_changes
from tonnage.script.setting_changes import Change, list_setting_changes
from tonnage.shallow.depths import roomy

MOST_TRIES: Final = 3
"""Runs of the script with other settings, at most."""

_MATHEMATICS: Final = frozenset(("optim", "bf16", "fp16", "mixed_precision"))
"""Settings whose change makes training compute something else, but for implementations of one optimizer."""

Progress = Callable[[str], None]


def answers(
    asked: Asked, *, steps: int | None, rank: int | None, advise: bool = True, progress: Progress = lambda text: None
) -> Generator[Run]:
    """Yield the dry-run of a script; if it does not fit, or only barely, also the answer with `advice`.

    Raises as `dry_run.run` does.
    """
    if advise:
        engine_advice.say_eager_answer(asked, progress)
    began = time.monotonic()
    run = _run(asked, steps, rank, progress)
    estimate = run.estimate
    if estimate.serving is not None:
        took_seconds = time.monotonic() - began
        yield run
        if advise and not estimate.fits and engine_advice.used_card(estimate):
            ends = time.monotonic() + MOST_TRIES * took_seconds
            tries = engine_advice.try_changes(asked, estimate, MOST_TRIES, lambda: time.monotonic() > ends, progress)
            advice = tuple(sorted(tries, key=lambda one: not one.fits))
            yield replace(run, estimate=replace(estimate, advice=advice))
        return
    if not estimate.wants_advice:
        yield run
        return
    whole = run
    if not estimate.fits_card:
        progress("running it again on cards without a limit, to see what all steps need")
        boundless = replace(asked, cluster=roomy(asked.cluster))
        try:
            whole = _run(boundless, steps, rank, progress)
        except TrialFailed:
            yield run
            return
        if whole.estimate.fits_card:
            run = replace(run, estimate=_with_needed(estimate, whole.estimate))
    yield run
    if advise and whole.estimate.fits_card:
        most_seconds = time.monotonic() - began
        tried = itertools.islice(_try_settings(asked, whole, progress, most_seconds), MOST_TRIES)
        advice = tuple(_as_advice(one, asked, whole.estimate) for one in tried)
        yield replace(run, estimate=replace(run.estimate, advice=tuple(sorted(advice, key=lambda one: not one.fits))))


def _run(asked: Asked, steps: int | None, rank: int | None, progress: Progress) -> Run:
    return dry_run.run(
        asked.command,
        asked.cluster,
        steps=steps,
        timeout_seconds=asked.timeout_seconds,
        rank=rank,
        torch_version=asked.torch_version,
        requests=asked.requests,
        progress=progress,
    )


def _with_needed(estimate: Estimate, whole: Estimate) -> Estimate:
    """Return an estimate that does not fit, with what its steps need on cards without a limit."""
    return replace(
        estimate,
        needed=whole.peak,
        needed_seconds=whole.time.get("step_seconds"),
        model={**whole.model, "name": estimate.model["name"]},
    ).with_host(whole.host)


@dataclass(frozen=True)
class _Attempt:
    """Settings to run the script with, and the question: its cards are larger ones where these cannot hold it."""

    asked: Asked
    changes: Sequence[Change]


@dataclass(frozen=True)
class _Outcome:
    """An attempt, and what the script needed in it."""

    attempt: _Attempt
    tried: Tried

    def fits(self, asked: Asked) -> bool:
        """Return True if it fits on cards that were asked for, or on larger ones of the catalog."""
        return self.tried.estimate.fits and self.attempt.asked.cluster != roomy(asked.cluster)


def _try_settings(asked: Asked, whole: Run, progress: Progress, most_seconds: float) -> Iterator[_Outcome]:
    """Yield runs of the script with other settings that gain something, until one fits or the time is over.

    A run that ends out of memory is not among them: what all of its steps need is not known.
    """
    facts = Facts.of(whole.traces[0])
    began = time.monotonic()
    for attempt in _list_attempts(asked, facts, whole.estimate, progress):
        try:
            tried = try_changes(attempt.asked, facts, attempt.changes, progress)
        except TrialFailed:
            continue
        outcome = _Outcome(attempt, tried)
        helps = not attempt.changes or _gains(tried.estimate, whole.estimate)
        if tried.estimate.fits_card and helps and not tried.not_taken:
            yield outcome
        if attempt.asked == asked and (tried.estimate.fits or time.monotonic() - began > most_seconds):
            return


def _gains(changed: Estimate, whole: Estimate) -> bool:
    """Return True if it needs less of the memory that was short."""
    if whole.host.fits:
        return changed.peak.process_bytes < whole.peak.process_bytes
    return (changed.host.machine_bytes or 0) < (whole.host.machine_bytes or 0)


def _list_attempts(asked: Asked, facts: Facts, whole: Estimate, progress: Progress) -> Iterator[_Attempt]:
    """Yield settings to try together, those that are likely to fit first.

    Where none is, those that come nearest, on cards without a limit, and the script as it is on a card that holds it.
    """
    card = asked.cluster.device.capacity_bytes
    possible = [rung for rung in list_rungs(facts, asked.command, fits=False) if may_suffice(rung, whole.peak, card)]
    rungs = [_Attempt(asked, rung) for rung in possible]
    try:
        now = understood(facts)
    except NotUnderstood:
        yield from rungs
        if whole.peak.process_bytes > card:
            larger = list_cards(asked.cluster, whole.peak)
            yield from (_Attempt(replace(asked, cluster=cluster), ()) for cluster in itertools.islice(larger, 1))
        return
    present = Candidate(job=now.job, plan=now.plan)
    best = _try_in_process(asked, facts, now, whole, progress)
    own = [one for one in best if one.change.cluster is None]
    for one in sorted(own, key=lambda one: not one.fits):
        changed = Candidate(job=one.case.job, plan=one.case.plan)
        on = asked if one.fits else replace(asked, cluster=roomy(asked.cluster))
        yield _Attempt(on, list_setting_changes(present, changed, facts, asked.command))
    for one in best:
        if one.change.cluster is not None and one.change.cluster.gpus == asked.cluster.gpus:
            yield _Attempt(replace(asked, cluster=one.change.cluster), ())
    if any(one.fits for one in own) or not best:
        yield from rungs


def _try_in_process(
    asked: Asked, facts: Facts, now: Understood, whole: Estimate, progress: Progress
) -> Sequence[TriedOptions]:
    """Return the changes with which the script's job fits in tonnage's own process, or else comes nearest."""
    case = Case(now.job, now.plan, asked.cluster)
    progress("trying what would make it fit")
    try:
        with TrialRunner(progress, WORKERS, asked.torch_version) as runner:
            accepts = partial(_is_settable, case=case, facts=facts, asked=asked)
            trials = Trials(case, whole.peak, runner, host=whole.host, accepts=accepts)
            trials.run()
            return trials.best()
    except TonnageError:
        return ()


def _is_settable(change: Options, case: Case, facts: Facts, asked: Asked) -> bool:
    """Return True if the script has settings for a change."""
    if change.cluster is not None:
        return not change.options
    changed = apply(change, case)
    if changed is None or {"method", "seq_len"} & change.options.keys():
        return False
    if changed.plan.param_offload != case.plan.param_offload and not can_shard(asked):
        return False
    if changed.job.micro_batch != case.job.micro_batch and not can_set_batch(asked, facts):
        return False
    return not any(
        has_no_setting(name, value, changed.job, changed.plan, facts, case.cluster)
        for name, value in change.options.items()
        if hasattr(changed.plan, name)
    )


def _as_advice(outcome: _Outcome, asked: Asked, whole: Estimate) -> Advice:
    tried, fits = outcome.tried, outcome.fits(asked)
    change, line = {**tried.environment, **tried.settings}, tried.line
    if tried.in_code:
        line += f"  # with {', '.join(tried.in_code)} in the code"
    if not outcome.attempt.changes:
        cluster = outcome.attempt.asked.cluster
        change = {"gpu": str(cluster)}
        line = f"tonnage dry-run {spell_options(cluster)} -- {shlex.join(asked.command)}"
    return Advice(
        change=change,
        command=line,
        fits=fits,
        peak_bytes=tried.estimate.peak.process_bytes,
        gain_bytes=whole.peak.process_bytes - tried.estimate.peak.process_bytes,
        step_seconds=tried.estimate.time.get("step_seconds"),
        changes_mathematics=any(
            change.technique == "rows" or setting.name in _MATHEMATICS
            for change in outcome.attempt.changes
            for setting in change.settings
        ),
        host_bytes=tried.estimate.host.machine_bytes,
        is_tight=fits and tried.estimate.is_tight,
    )
