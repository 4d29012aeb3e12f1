"""Complete the dry-run of a script that does not fit: what all of its steps need, and settings that were tried.

The script is run once more on cards without a limit.  If it can be read as a Job under a Plan, changes are tried in
tonnage's own process first (`tonnage.advice`), and those that fit there are tried on the script itself; else the
rungs of the ladder are.  What is shown was run by the script.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from tonnage.advice.advise import WORKERS
from tonnage.advice.changes import Change as Options
from tonnage.advice.changes import apply
from tonnage.advice.trials import Trials
from tonnage.case import Case
from tonnage.errors import TonnageError, TrialFailed
from tonnage.estimates.estimate import Advice, Estimate
from tonnage.estimates.from_traces import Run
from tonnage.planner.solution import Candidate
from tonnage.planner.trial_runner import TrialRunner
from tonnage.script import dry_run, engine_advice
from tonnage.script.facts import Facts, NotUnderstood, Understood, understood
from tonnage.script.ladder import list_rungs
from tonnage.script.planning import Asked, Tried, can_shard, has_no_setting, try_changes
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
    began = time.monotonic()
    run = _run(asked, steps, rank, progress)
    took_seconds = time.monotonic() - began
    estimate = run.estimate
    if estimate.serving is not None:
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
        tried = itertools.islice(_try_settings(asked, whole, progress, took_seconds), MOST_TRIES)
        advice = tuple(_as_advice(one, whole.estimate) for one in tried)
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


def _try_settings(asked: Asked, whole: Run, progress: Progress, most_seconds: float) -> Iterator[Tried]:
    """Yield runs of the script with other settings that gain something, until one fits or the time is over.

    A run that ends out of memory is not among them: what all of its steps need is not known.
    """
    facts = Facts.of(whole.traces[0])
    began = time.monotonic()
    for changes in _list_settings(asked, facts, whole.estimate, progress):
        try:
            tried = try_changes(asked, facts, changes, progress)
        except TrialFailed:
            continue
        if tried.estimate.fits_card and _gains(tried.estimate, whole.estimate) and not tried.not_taken:
            yield tried
        if tried.estimate.fits or time.monotonic() - began > most_seconds:
            return


def _gains(changed: Estimate, whole: Estimate) -> bool:
    """Return True if it needs less of the memory that was short."""
    if whole.host.fits:
        return changed.peak.process_bytes < whole.peak.process_bytes
    return (changed.host.machine_bytes or 0) < (whole.host.machine_bytes or 0)


def _list_settings(asked: Asked, facts: Facts, whole: Estimate, progress: Progress) -> Iterator[Sequence[Change]]:
    """Yield settings to try together, those that are likely to fit first."""
    try:
        now = understood(facts)
    except NotUnderstood:
        yield from list_rungs(facts, asked.command, fits=False)
        return
    yield from _list_fitting(asked, facts, now, whole, progress)
    yield from list_rungs(facts, asked.command, fits=False)


def _list_fitting(
    asked: Asked, facts: Facts, now: Understood, whole: Estimate, progress: Progress
) -> Iterator[Sequence[Change]]:
    """Yield the settings of changes that make the script's job fit in tonnage's own process."""
    case = Case(now.job, now.plan, asked.cluster)
    progress("trying what would make it fit")
    try:
        with TrialRunner(progress, WORKERS, asked.torch_version) as runner:
            accepts = partial(_is_settable, case=case, facts=facts, sharding=can_shard(asked))
            trials = Trials(case, whole.peak, runner, host=whole.host, accepts=accepts)
            trials.run()
            found = [one for one in trials.best() if one.fits and one.change.cluster is None]
    except TonnageError:
        return
    present = Candidate(job=now.job, plan=now.plan)
    for one in found:
        best = Candidate(job=one.case.job, plan=one.case.plan)
        yield list_setting_changes(present, best, facts, asked.command)


def _is_settable(change: Options, case: Case, facts: Facts, *, sharding: bool) -> bool:
    """Return True if the script has settings for a change; `sharding`: it has a process group."""
    changed = apply(change, case)
    if changed is None or change.cluster is not None or {"method", "seq_len"} & change.options.keys():
        return False
    if changed.plan.param_offload != case.plan.param_offload and not sharding:
        return False
    return not any(
        has_no_setting(name, value, changed.job, changed.plan, facts, case.cluster)
        for name, value in change.options.items()
        if hasattr(changed.plan, name)
    )


def _as_advice(tried: Tried, whole: Estimate) -> Advice:
    code = f"  # with {', '.join(tried.in_code)} in the code" if tried.in_code else ""
    return Advice(
        change={**tried.environment, **tried.settings},
        command=f"{tried.line}{code}",
        fits=tried.estimate.fits,
        peak_bytes=tried.estimate.peak.process_bytes,
        gain_bytes=whole.peak.process_bytes - tried.estimate.peak.process_bytes,
        step_seconds=tried.estimate.time.get("step_seconds"),
        changes_mathematics=not _MATHEMATICS.isdisjoint(tried.settings),
        host_bytes=tried.estimate.host.machine_bytes,
    )
