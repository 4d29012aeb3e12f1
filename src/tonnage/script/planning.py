"""`tonnage plan -- python train.py`: plan which settings of a script to change.

The script is dry-run as it is, a plan is made for the job that it was seen to be, and the script is dry-run again
with the settings of the plan.  A setting is given by the script's own flag; if there is none, it is put into the
script's arguments as they are made.  So both results that are shown have been run.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

from tonnage.case import Case, check_unused
from tonnage.cluster import Cluster
from tonnage.errors import TrialFailed, UsageError
from tonnage.estimates.estimate import Estimate
from tonnage.job import Job
from tonnage.mesh import SHARDING
from tonnage.options import spell_option
from tonnage.planner.candidates import free_choices
from tonnage.planner.describe import describe
from tonnage.planner.probe import Need
from tonnage.planner.question import Question
from tonnage.planner.reasons import EFFECTS
from tonnage.planner.search_space import ORDER
from tonnage.planner.solution import Candidate, Refused, Solution
from tonnage.planner.solve import search
from tonnage.planner.trial_runner import Failure, TrialRunner
from tonnage.plans import HEADROOM, Plan
from tonnage.script import dry_run, launchers
from tonnage.script.changed_command import change_command, write_line
from tonnage.script.command import find_flag
from tonnage.script.facts import Facts, NotUnderstood, Understood, describe_recognised, understood
from tonnage.script.ladder import list_rungs, may_suffice
from tonnage.script.setting_changes import (
    BATCH,
    Change,
    compute_added_seconds,
    compute_saved_bytes,
    list_changes,
    price_step,
)
from tonnage.serving.lengths import Lengths
from tonnage.shallow.depths import roomy
from tonnage.trainers import engine_of
from tonnage.units import format_gib

Progress = Callable[[str], None]

MOST_TRIES: Final = 3
"""Plans that are tried on the script before the answer is that none fits."""

MOST_RUNGS: Final = 5
"""Runs of a script that no plan can be made for, with one rung of the ladder each."""

LEAST_FURTHER: Final = 0.02
"""Fraction of the GPU that stays free in addition, at least, in the plan after one that did not fit."""

LOOPS_NOT: Final = (
    *("shard", "tp", "pp", "cp", "ep", "accum-sync", "optimizer-in-backward", "loss", "checkpointing=selective"),
    *("checkpointing=budget", "activation-offload", "optimizer-offload", "param-offload"),
)
"""Options that a loop with an Accelerator would have to be rewritten for, or that its launcher decides."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A script, and what may be changed in it."""

    command: list[str]
    """The command line as typed."""
    cluster: Cluster
    """The GPUs."""
    stated: Mapping[str, Any]
    """Options of Plan that the user gave; they are kept."""
    only: tuple[str, ...] = ()
    """As in `Question`."""
    without: tuple[str, ...] = ()
    """As in `Question`."""
    allow: tuple[str, ...] = ()
    """As in `Question`."""
    headroom: float = HEADROOM
    """Fraction of the GPU that stays free."""
    timeout_seconds: float = 900.0
    """Time limit of each run of the script."""
    torch_version: str | None = None
    """Version of torch to run; None: the installed one."""
    requests: Lengths | None = None
    """Requests that an inference engine serves once it has started."""

    @property
    def budget_bytes(self) -> int:
        """Return the bytes of the GPU that a process may use."""
        return int(self.cluster.device.capacity_bytes * (1 - self.headroom))


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A dry-run of the script with other settings."""

    estimate: Estimate
    """The estimate of the dry-run."""
    command: tuple[str, ...]
    """The command line with the settings."""
    environment: Mapping[str, str]
    """Variables to set for it."""
    settings: Mapping[str, Any]
    """All other settings that were changed, by their names."""
    arguments: Mapping[str, Any]
    """Settings to write into the script's own code; the run put them into the objects that the script makes."""
    in_code: tuple[str, ...]
    """The same settings as lines of code."""
    not_taken: tuple[str, ...]
    """A sentence about each setting that did not take effect."""

    @property
    def line(self) -> str:
        """Return the shell command with the variables in front."""
        return write_line(self.command, self.environment)


@dataclass(frozen=True, kw_only=True)
class ScriptPlan:
    """The answer for a script: the settings to change."""

    command: tuple[str, ...]
    """The command line as typed."""
    budget_bytes: int
    """Bytes of the GPU that a process may use."""
    seen: str
    """Description, in one line, of the job that the script was seen to be."""
    before: Estimate
    """The dry-run of the script as it is."""
    why_not: str | None = None
    """The reason why no plan was made, if none was."""
    by_trial: bool = False
    """True if the changes were found by trying settings, without a plan."""
    now: Understood | None = None
    """The job and the plan that the script runs now; None if no plan was made."""
    changes: tuple[Change, ...] = ()
    """The changes, the most effective first."""
    after: Tried | None = None
    """The dry-run with the changes; None if there are none, or none that fits."""
    failed: tuple[Refused, ...] = ()
    """Plans that did not fit, or did not run, when they were tried on the script."""
    unexpressed: tuple[Change, ...] = ()
    """Techniques that the script has no setting for, with their effect in tonnage's own loop."""
    solution: Solution | None = None
    """The answer of the search."""
    step_seconds: tuple[float | None, float | None] = (None, None)
    """Seconds of a step before and after the changes, by the time model."""

    @property
    def status(self) -> str:
        """Return the status of the document of `plan --json`."""
        if self.now is None and not self.by_trial:
            return "unknown"
        if self.answer.fits and (self.after is not None or not self.changes):
            return "found"
        if self.solution is not None and self.solution.status not in ("found", "too_large"):
            return self.solution.status
        return "too_large"

    @property
    def answer(self) -> Estimate:
        """Return the run with the changes, or the script's own if none were tried."""
        return self.before if self.after is None else self.after.estimate

    def has_room(self, estimate: Estimate) -> bool:
        """Return True if a run leaves the headroom of the GPU free."""
        return estimate.fits and estimate.peak.process_bytes <= self.budget_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the document of `plan --json`, with a part about the script."""
        empty = Solution(status="unknown", question={"command": list(self.command)})
        document = (self.solution or empty).to_json() | {"status": self.status}
        before, after = self.step_seconds
        return document | {
            "script": {
                "command": list(self.command),
                "seen": self.seen,
                "why_not": self.why_not,
                "by_trial": self.by_trial,
                "understood": None if self.now is None else self.now.words,
                "notes": [] if self.now is None else list(self.now.notes),
                "before": self.before.to_json(),
                "before_seconds": before,
                "changes": [asdict(change) for change in self.changes],
                "after": None if self.after is None else self.after.estimate.to_json(),
                "after_seconds": after,
                "after_command": None if self.after is None else list(self.after.command),
                "environment": {} if self.after is None else dict(self.after.environment),
                "arguments": {} if self.after is None else dict(self.after.arguments),
                "in_code": [] if self.after is None else list(self.after.in_code),
                "not_taken": [] if self.after is None else list(self.after.not_taken),
                "failed": [asdict(refused) for refused in self.failed],
                "unexpressed": [asdict(change) for change in self.unexpressed],
            }
        }


def check_options(stated: dict[str, Any], cluster: Cluster) -> dict[str, Any]:
    """Return the options that were given for a script.

    Raises UsageError for an option that the script itself sets, and for one that has no effect.
    """
    of_plan = {item.name for item in fields(Plan)} - {"engine"}
    for name in stated:
        if name not in of_plan:
            raise UsageError(f"--{spell_option(name)} is set by the script itself; change it there.")
    check_unused(stated, Plan(**stated), cluster.gpus, lambda name: name not in stated)
    return stated


def plan_script(asked: Asked, progress: Progress = lambda text: None) -> ScriptPlan:
    """Run the script, plan for the job that it is, and run it again with the settings of the plan.

    Raises TrialFailed if the script itself fails, UsageError for a contradictory question, GhostUnavailable.
    """
    before, facts = _run(asked, asked.command, {}, progress)
    common: dict[str, Any] = {
        "command": tuple(asked.command),
        "budget_bytes": asked.budget_bytes,
        "seen": describe_recognised(facts),
        "before": before,
    }
    try:
        now = understood(facts)
    except NotUnderstood as reason:
        return _try_rungs(asked, facts, str(reason), common, progress)
    with TrialRunner(progress, torch=asked.torch_version) as runner:
        return _try_plans(asked, facts, now, runner, common, progress)


def _try_plans(
    asked: Asked, facts: Facts, now: Understood, runner: TrialRunner, common: dict[str, Any], progress: Progress
) -> ScriptPlan:
    """Return the settings of the fastest plan that fits when the script itself runs it.

    One that fits without the headroom is kept, in case that no plan after it leaves more.
    """
    question = make_question(asked, now, facts)
    failed: list[Refused] = []
    present = Candidate(job=now.job, plan=now.plan)
    script_plan: ScriptPlan | None = None
    barely: ScriptPlan | None = None
    for _ in range(MOST_TRIES):
        solution = search(question, runner, top=1, explain=False, progress=progress)
        if not solution.plans and script_plan is None:
            return ScriptPlan(**common, now=now, solution=solution)
        if not solution.plans:
            break
        best = solution.plans[0].candidate
        progress("running the plan without each change, to see its effect")
        changes = list_changes(now, best, facts, question, runner, asked.command)
        changes = _sort_by_effect(changes, common["before"], asked)
        script_plan = ScriptPlan(
            **common,
            now=now,
            solution=solution,
            changes=changes,
            failed=tuple(failed),
            unexpressed=_list_unexpressed(best, facts, question, runner),
            step_seconds=(price_step(present, question), price_step(best, question)),
        )
        if not changes:
            return script_plan
        try:
            script_plan = replace(script_plan, after=try_changes(asked, facts, changes, progress))
        except TrialFailed as error:
            return replace(script_plan, failed=(*failed, Refused(what=describe(best), why=str(error))))
        peak = script_plan.answer.peak.process_bytes
        if script_plan.has_room(script_plan.answer):
            return script_plan
        if script_plan.answer.fits:
            barely = barely or script_plan
        else:
            why = f"does not fit: the script itself needs more than {format_gib(peak)}"
            failed.append(Refused(what=describe(best), why=why))
        excess = (peak - solution.plans[0].estimate.peak.process_bytes) / asked.cluster.device.capacity_bytes
        question = replace(question, headroom=min(question.headroom + max(excess, LEAST_FURTHER), 0.9))
    if barely is not None:
        return replace(barely, failed=tuple(failed))
    assert script_plan is not None
    return replace(script_plan, after=None, failed=tuple(failed))


def make_question(asked: Asked, now: Understood, facts: Facts) -> Question:
    """Return the question to the search; options that the script has no setting for stay as they are."""
    keep = now.openly(asked.stated)
    if now.plan.precision == "fp32" and "precision" in asked.without:
        keep = replace(keep, precision="fp32")
    if facts.is_launchers:
        keep = replace(keep, shard=now.plan.shard, param_offload=now.plan.param_offload)
    if (
        facts.is_launchers and not facts.is_loop and now.plan.shard in SHARDING
    ):  # FSDP's settings decide checkpointing, too
        keep = replace(keep, checkpointing=now.plan.checkpointing)
    needs_launcher = () if can_shard(asked) else ("param-offload",)
    kept = () if "attention" in asked.without else ("attention",)  # the script chooses it when it makes its network
    return Question(
        job=now.job,
        plan=keep,
        cluster=asked.cluster,
        stated=(*asked.stated, *kept),
        only=asked.only,
        without=(*asked.without, *(LOOPS_NOT if facts.is_loop else needs_launcher)),
        only_micro_batch=None if can_set_batch(asked, facts) else now.job.micro_batch,
        allow=asked.allow,
        headroom=asked.headroom,
    )


def can_set_batch(asked: Asked, facts: Facts) -> bool:
    """Return True if micro-batch and accumulation can be set: a loop of the script's own needs flags for both."""
    flags = (find_flag(name, facts.options, asked.command, facts.settings.get(name)) for name in BATCH)
    return not facts.is_loop or all(flags)


def can_shard(asked: Asked) -> bool:
    """Return True if the command makes a process group, without which FSDP moves no parameters to the host."""
    return launchers.is_launched(asked.command) or asked.cluster.gpus > 1


def _sort_by_effect(changes: tuple[Change, ...], before: Estimate, asked: Asked) -> tuple[Change, ...]:
    """Return the changes by the bytes that they save if the script does not fit, else by the seconds."""
    is_tight = not before.fits or before.peak.process_bytes > asked.budget_bytes
    if is_tight or any(change.costs_seconds is None for change in changes):
        return tuple(sorted(changes, key=lambda change: -(change.saves_bytes or 0)))
    return tuple(sorted(changes, key=lambda change: (change.costs_seconds or 0.0, -(change.saves_bytes or 0))))


def try_changes(asked: Asked, facts: Facts, changes: Sequence[Change], progress: Progress) -> Tried:
    """Run the script with the changes.  Raises TrialFailed if it fails with them."""
    changed = change_command(asked.command, facts, changes)
    progress("running the script again, with the changes")
    estimate, after = _run(asked, list(changed.command), changed.variables, progress)
    return Tried(
        estimate=estimate,
        command=changed.command,
        environment=changed.environment,
        settings={setting.word: setting.after for setting in changed.settings if setting.where != "environment"},
        arguments=changed.arguments,
        in_code=changed.in_code,
        not_taken=tuple(changed.list_not_taken(after)),
    )


def _list_unexpressed(best: Candidate, facts: Facts, question: Question, runner: TrialRunner) -> tuple[Change, ...]:
    """Return the techniques that the script has no setting for, with their savings and costs in tonnage's own loop.

    Techniques that cannot be added to the plan in that loop either are left out.
    """
    own = Candidate(job=best.job, plan=replace(best.plan, engine="tonnage"))
    others = {
        technique: replace(own, plan=replace(own.plan, **{name: value}))
        for technique, name, value in _list_stronger(best, question.cluster)
        if has_no_setting(name, value, best.job, replace(best.plan, **{name: value}), facts, question.cluster)
    }
    needs = runner.probe([own, *others.values()], question.cluster)
    return tuple(
        Change(
            technique=technique,
            settings=(),
            why=EFFECTS[technique.partition("=")[0].replace("-", "_")],
            saves_bytes=compute_saved_bytes(needs[0], need),
            costs_seconds=compute_added_seconds(other, own, question),
        )
        for (technique, other), need in zip(others.items(), needs[1:], strict=True)
        if isinstance(need, Need) or isinstance(needs[0], Failure)
    )


def _list_stronger(best: Candidate, cluster: Cluster) -> Iterator[tuple[str, str, Any]]:
    """Yield the values that keep less in memory than the plan's own: technique in words, option and value."""
    plan = best.plan
    sparing = {"loss": "chunked"} if plan.loss == "plain" else {}
    for name, value in {**free_choices(best.job, plan, cluster), **sparing}.items():
        if getattr(plan, name) != value:
            yield f"{spell_option(name)}={value}", name, value
    for name, values in ORDER.items():
        if cluster.gpus == 1 and name in ("shard", "accum_sync"):
            continue
        present = getattr(plan, name)
        for value in values[values.index(present) + 1 :] if present in values else ():
            yield spell_option(name) if value is True else f"{spell_option(name)}={value}", name, value


def has_no_setting(name: str, value: Any, job: Job, plan: Plan, facts: Facts, cluster: Cluster) -> bool:
    """Return True if the script has no setting for a value."""
    if name == "attention":  # no flag of a Trainer or a launcher sets it
        return True
    if facts.is_loop:
        return spell_option(name) in LOOPS_NOT or f"{spell_option(name)}={value}" in LOOPS_NOT
    refusals = engine_of(plan).refusals(Case(job, plan, cluster))
    return any(
        refusal.technique.partition("=")[0] == spell_option(name) and "no setting" in refusal.reason
        for refusal in refusals
    )


def _try_rungs(asked: Asked, facts: Facts, why: str, common: dict[str, Any], progress: Progress) -> ScriptPlan:
    """Return the settings of the first rung of settings with which the script fits.

    For a loop of the script's own without flags that are known these are the settings of the allocator alone.
    """
    script_plan = ScriptPlan(**common, why_not=why, by_trial=facts.trainer is not None)
    before, capacity_bytes = script_plan.before, asked.cluster.device.capacity_bytes
    whole = before
    if facts.is_plain and facts.options and not before.fits_card:
        progress("running it on cards without a limit, to see its steps")
        with contextlib.suppress(TrialFailed):
            whole, facts = _run(replace(asked, cluster=roomy(asked.cluster)), asked.command, {}, progress)
    rungs = list(list_rungs(facts, asked.command, fits=script_plan.has_room(before)))
    if whole is not before:
        rungs = [rung for rung in rungs if may_suffice(rung, whole.peak, capacity_bytes)]
        script_plan = replace(script_plan, by_trial=len(rungs) > 0)
    failed: list[Refused] = []
    for rung in itertools.islice(rungs, MOST_RUNGS):
        words = "; ".join(str(setting) for change in rung for setting in change.settings)
        try:
            after = try_changes(asked, facts, rung, progress)
        except TrialFailed as error:
            failed.append(Refused(what=words, why=str(error)))
            continue
        changes = _with_saved_bytes(rung, whole, after.estimate)
        script_plan = replace(script_plan, changes=changes, after=after)
        if script_plan.has_room(after.estimate):
            break
    return replace(script_plan, failed=tuple(failed))


def _with_saved_bytes(changes: tuple[Change, ...], before: Estimate, after: Estimate) -> tuple[Change, ...]:
    """Return the changes, with the bytes saved if there is only one and both runs fit."""
    if len(changes) > 1 or not before.fits or not after.fits:
        return changes
    return (replace(changes[0], saves_bytes=before.peak.process_bytes - after.peak.process_bytes),)


def _run(
    asked: Asked, command: list[str], variables: Mapping[str, str], progress: Progress
) -> tuple[Estimate, Facts]:
    """Run the command on ghosts, of several ranks only the first, and return its estimate and the facts seen."""
    is_alone = asked.cluster.gpus > 1 and launchers.is_launched(command)
    run = dry_run.run(
        command,
        asked.cluster,
        rank=0 if is_alone else None,
        timeout_seconds=asked.timeout_seconds,
        torch_version=asked.torch_version,
        variables={**os.environ, **variables},
        progress=progress,
    )
    return run.estimate, Facts.of(run.traces[0])
