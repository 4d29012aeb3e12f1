"""`tonnage plan -- python train.py`: a script run as it is, a plan for what it was found to be, and the script again.

What is shown has been run: the script as it stands, and the script with the settings that are advised, in its own
flags where its command line has them, else put into its arguments as they are made.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from tonnage.case import Case
from tonnage.cluster import Cluster
from tonnage.errors import TrialFailed
from tonnage.estimates.estimate import Estimate
from tonnage.job import Job
from tonnage.mesh import SHARDING
from tonnage.options import spelled
from tonnage.planner.describe import describe
from tonnage.planner.probe import Need
from tonnage.planner.question import Question
from tonnage.planner.reasons import EFFECTS
from tonnage.planner.solution import Candidate, Refused, Solution
from tonnage.planner.solve import search
from tonnage.planner.space import free_choices
from tonnage.planner.trial_runner import Failure, TrialRunner
from tonnage.planner.values import ORDER
from tonnage.plans import HEADROOM, Plan
from tonnage.script import dry_run as dryrun
from tonnage.script import launchers
from tonnage.script.changes import Change, Setting, changes, difference, holds, saved, seconds
from tonnage.script.command import flag, with_value
from tonnage.script.facts import Facts, NotUnderstood, Understood, seen, understood
from tonnage.script.ladder import rungs
from tonnage.trainers import engine_of
from tonnage.units import gib

Progress = Callable[[str], None]

MOST_TRIES: Final = 3
"""Plans that are tried on the script before there is none to show."""

MOST_RUNGS: Final = 5
"""Runs of a script that no plan can be made for."""

LEAST_FURTHER: Final = 0.02
"""Of the card: how much more stays free, at least, in the plan after one that did not fit."""


BATCH: Final = ("per_device_train_batch_size", "gradient_accumulation_steps")
"""Flags without which a loop's batches cannot be divided otherwise."""

LOOPS_NOT: Final = (
    *("shard", "tp", "pp", "cp", "ep", "accum-sync", "optimizer-in-backward", "loss", "checkpointing=selective"),
    *("checkpointing=budget", "activation-offload", "optimizer-offload", "param-offload"),
)
"""What a loop with an Accelerator would have to be rewritten for, or its launcher decides."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked of a script."""

    command: list[str]
    """As it would be typed."""
    cluster: Cluster
    """The GPUs."""
    said: Mapping[str, Any]
    """Options of Plan that the user has said: they are kept."""
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    headroom: float = HEADROOM
    """Part of the card that stays free."""
    timeout_seconds: float = 900.0
    """For each run of the script."""
    torch_version: str | None = None
    """Another torch than the installed one."""

    @property
    def budget_bytes(self) -> int:
        """What a process may use of the card."""
        return int(self.cluster.device.capacity_bytes * (1 - self.headroom))


@dataclass(frozen=True, kw_only=True)
class Tried:
    """The script with other settings, as it was run."""

    estimate: Estimate
    """Of the dry-run."""
    command: tuple[str, ...]
    """As it is typed then."""
    environment: Mapping[str, str]
    """Variables before it."""
    arguments: Mapping[str, Any]
    """What has to be written in the script's own code; in the run it was put into the objects that it makes."""
    in_code: tuple[str, ...]
    """The same as somebody would write it."""
    not_taken: tuple[str, ...]
    """Settings that the script did not take, in sentences."""

    @property
    def line(self) -> str:
        """What to type."""
        words = [*(f"{name}={value}" for name, value in self.environment.items()), *self.command]
        return shlex.join(["env", *words] if self.environment else words)


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to change in a script."""

    command: tuple[str, ...]
    """As it was typed."""
    budget_bytes: int
    """What a process may use of the card."""
    seen: str
    """What it was recognised as, in a line."""
    before: Estimate
    """As it is."""
    why_not: str | None = None
    """Why nothing was planned, where nothing was."""
    by_trial: bool = False
    """Whether its changes were found by trying them, without a plan."""
    now: Understood | None = None
    """In the program's own words; None where nothing was planned."""
    changes: tuple[Change, ...] = ()
    """What to change, what matters most first."""
    after: Tried | None = None
    """With the changes; None where there are none, or none that fits."""
    failed: tuple[Refused, ...] = ()
    """Plans that were tried on the script and did not fit, or did not run."""
    unexpressed: tuple[Change, ...] = ()
    """Techniques that the script has no setting for, as they are in a loop of tonnage's own."""
    solution: Solution | None = None
    """Of the search."""
    step_seconds: tuple[float | None, float | None] = (None, None)
    """Before and after, by the time model."""

    @property
    def status(self) -> str:
        """As in `plan --json`."""
        if self.now is None and not self.by_trial:
            return "unknown"
        if self.fits(self.before) and not self.changes:
            return "found"
        if self.after is not None and self.fits(self.after.estimate):
            return "found"
        if self.solution is not None and self.solution.status not in ("found", "too_large"):
            return self.solution.status
        return "too_large"

    def fits(self, estimate: Estimate) -> bool:
        """Whether a run leaves as much of the card free as it should."""
        return estimate.fits and estimate.peak.process_bytes <= self.budget_bytes

    def to_json(self) -> dict[str, Any]:
        """The document of `plan --json`, with what is known of the script."""
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
                "failed": [asdict(one) for one in self.failed],
                "unexpressed": [asdict(one) for one in self.unexpressed],
            }
        }


def advise(asked: Asked, progress: Progress = lambda text: None) -> Advice:
    """Run the script, plan for what it is, and run it again as advised.

    Raises TrialFailed where the script itself fails, UsageError for a contradictory question, GhostUnavailable.
    """
    before, facts = _run(asked, asked.command, {}, progress)
    common: dict[str, Any] = {
        "command": tuple(asked.command),
        "budget_bytes": asked.budget_bytes,
        "seen": seen(facts),
        "before": before,
    }
    try:
        now = understood(facts)
    except NotUnderstood as reason:
        return _without_plan(asked, facts, str(reason), common, progress)
    with TrialRunner(progress, torch=asked.torch_version) as runner:
        return _planned(asked, facts, now, runner, common, progress)


def _planned(
    asked: Asked, facts: Facts, now: Understood, runner: TrialRunner, common: dict[str, Any], progress: Progress
) -> Advice:
    """Plans, fastest first, until one of them fits when the script itself runs it."""
    question = _question(asked, now, facts)
    failed: list[Refused] = []
    here = Candidate(job=now.job, plan=now.plan)
    for _ in range(MOST_TRIES):
        solution = search(question, runner, top=1, explain=False, progress=progress)
        if not solution.plans:
            return Advice(**common, now=now, solution=solution, failed=tuple(failed))
        best = solution.plans[0].candidate
        progress("taking each change back, to see what it is for")
        found = _sorted(changes(now, best, facts, question, runner, asked.command), common["before"], asked)
        advice = Advice(
            **common,
            now=now,
            solution=solution,
            changes=found,
            failed=tuple(failed),
            unexpressed=_unexpressed(best, facts, question, runner),
            step_seconds=(seconds(here, question), seconds(best, question)),
        )
        if not found:
            return advice
        try:
            advice = replace(advice, after=_tried(asked, facts, found, progress))
        except TrialFailed as error:
            return replace(advice, failed=(*failed, Refused(what=describe(best), why=str(error))))
        if advice.status == "found":
            return advice
        assert advice.after is not None
        peak = advice.after.estimate.peak.process_bytes
        failed.append(Refused(what=describe(best), why=f"does not fit: {gib(peak)} in the script itself"))
        further = (peak - solution.plans[0].estimate.peak.process_bytes) / asked.cluster.device.capacity_bytes
        question = replace(question, headroom=min(question.headroom + max(further, LEAST_FURTHER), 0.9))
    return replace(advice, after=None, failed=tuple(failed))


def _question(asked: Asked, now: Understood, facts: Facts) -> Question:
    keep, launched = now.openly(asked.said), launchers.is_launched(asked.command)
    if now.plan.precision == "fp32" and "precision" in asked.without:
        keep = replace(keep, precision="fp32")
    if facts.is_launchers:
        keep = replace(keep, shard=now.plan.shard, param_offload=now.plan.param_offload)
    if facts.is_launchers and not facts.is_loop and now.plan.shard in SHARDING:  # it checkpoints as well
        keep = replace(keep, checkpointing=now.plan.checkpointing)
    moving = () if launched or asked.cluster.gpus > 1 else ("param-offload",)  # sharding on one GPU wants a launcher
    divides = all(flag(name, facts.options) for name in BATCH)
    kept = () if "attention" in asked.without else ("attention",)  # it is chosen where the script makes its network
    return Question(
        job=now.job,
        plan=keep,
        cluster=asked.cluster,
        stated=(*asked.said, *kept),
        only=asked.only,
        without=(*asked.without, *(LOOPS_NOT if facts.is_loop else moving)),
        only_micro_batch=now.job.micro_batch if facts.is_loop and not divides else None,
        allow=asked.allow,
        headroom=asked.headroom,
    )


def _sorted(found: tuple[Change, ...], before: Estimate, asked: Asked) -> tuple[Change, ...]:
    """Where the script does not fit what saves most comes first, else what gains most seconds."""
    tight = not before.fits or before.peak.process_bytes > asked.budget_bytes
    if tight or any(change.costs_seconds is None for change in found):
        return tuple(sorted(found, key=lambda change: -(change.saves_bytes or 0)))
    return tuple(sorted(found, key=lambda change: (change.costs_seconds or 0.0, -(change.saves_bytes or 0))))


def _tried(asked: Asked, facts: Facts, found: Sequence[Change], progress: Progress) -> Tried:
    """The script with the changes.  Raises TrialFailed where it does not take them."""
    settings = [setting for change in found for setting in change.settings]
    command = list(asked.command)
    for setting in settings:
        if setting.where == "flag":
            command = with_value(command, setting.name, setting.after, facts.options)
        elif setting.where == "launcher":
            command = launchers.told(command, f"--{setting.name}", str(setting.after))
    environment = {setting.name: str(setting.after) for setting in settings if setting.where == "environment"}
    arguments = {setting.name: setting.after for setting in settings if setting.where == "argument"}
    put_in = {**arguments, "of": "loop"} if facts.is_loop else arguments
    variables = {**environment, **({"TONNAGE_SETTINGS": json.dumps(put_in)} if arguments else {})}
    progress("running the script again, with the changes")
    estimate, after = _run(asked, command, variables, progress)
    return Tried(
        estimate=estimate,
        command=tuple(command),
        environment=environment,
        arguments=arguments,
        in_code=tuple(_in_code(name, value, facts) for name, value in arguments.items()),
        not_taken=tuple(_not_taken(settings, after)),
    )


_LOOPS_CODE: Final = {
    "mixed_precision": "Accelerator(mixed_precision={!r})",
    "gradient_accumulation_steps": "Accelerator(gradient_accumulation_steps={!r})",
    "fused": "torch.optim.AdamW(..., fused={!r})",
}


def _in_code(name: str, value: Any, facts: Facts) -> str:
    """How a script says a setting that it has no flag for."""
    if not facts.is_loop:
        return f"{facts.arguments}({name}={value!r})"
    if name == "gradient_checkpointing":
        return f"model.gradient_checkpointing_{'enable' if value else 'disable'}()"
    return _LOOPS_CODE[name].format(value)


def _not_taken(settings: Sequence[Setting], after: Facts) -> list[str]:
    """What the script's own objects do not say after it was told so."""
    wrong = []
    for setting in settings:
        if setting.where == "environment":
            if str(setting.after) not in after.allocator_settings:
                wrong.append(f"{setting} did not reach the process, which says {after.allocator_settings!r}.")
        elif not holds(after.settings.get(setting.name), setting.after):
            wrong.append(
                f"{setting.name} was given as {setting.after}, and the script made it "
                f"{after.settings.get(setting.name)}."
            )
    return wrong


def _unexpressed(best: Candidate, facts: Facts, question: Question, runner: TrialRunner) -> tuple[Change, ...]:
    """Techniques that the script has no setting for, with what they would save and cost in tonnage's own loop.

    What cannot be run there either, beside what the plan has, is none.
    """
    own = Candidate(job=best.job, plan=replace(best.plan, engine="tonnage"))
    others = {
        what: replace(own, plan=replace(own.plan, **{name: value}))
        for what, name, value in _further(best, question.cluster)
        if _has_no_words(name, value, best.job, replace(best.plan, **{name: value}), facts, question.cluster)
    }
    needs = runner.probe([own, *others.values()], question.cluster)
    return tuple(
        Change(
            technique=what,
            settings=(),
            why=EFFECTS[what.partition("=")[0].replace("-", "_")],
            saves_bytes=saved(needs[0], need),
            costs_seconds=difference(other, own, question),
        )
        for (what, other), need in zip(others.items(), needs[1:], strict=True)
        if isinstance(need, Need) or isinstance(needs[0], Failure)
    )


def _further(best: Candidate, cluster: Cluster) -> Iterator[tuple[str, str, Any]]:
    """Values that keep less than the plan's own: in words, the option, the value."""
    plan = best.plan
    for name, value in free_choices(best.job, plan, cluster).items():
        if getattr(plan, name) != value:
            yield f"{spelled(name)}={value}", name, value
    for name, values in ORDER.items():
        if cluster.gpus == 1 and name in ("shard", "accum_sync"):
            continue
        now = getattr(plan, name)
        for value in values[values.index(now) + 1 :] if now in values else ():
            yield spelled(name) if value is True else f"{spelled(name)}={value}", name, value


def _has_no_words(name: str, value: Any, job: Job, plan: Plan, facts: Facts, cluster: Cluster) -> bool:
    if name == "attention":  # which no flag of a Trainer's, nor a launcher's, says
        return True
    if facts.is_loop:
        return spelled(name) in LOOPS_NOT or f"{spelled(name)}={value}" in LOOPS_NOT
    refusals = engine_of(plan).refusals(Case(job, plan, cluster))
    return any(one.technique.partition("=")[0] == spelled(name) and "no setting" in one.reason for one in refusals)


def _without_plan(asked: Asked, facts: Facts, why: str, common: dict[str, Any], progress: Progress) -> Advice:
    """Settings that need no plan, tried until the script fits: a loop of its own has the allocator's alone."""
    advice = Advice(**common, why_not=why, by_trial=facts.trainer is not None)
    fits = advice.fits(advice.before)
    failed: list[Refused] = []
    for found in itertools.islice(rungs(facts, asked.command, fits=fits), MOST_RUNGS):
        words = "; ".join(str(setting) for change in found for setting in change.settings)
        try:
            after = _tried(asked, facts, found, progress)
        except TrialFailed as error:
            failed.append(Refused(what=words, why=str(error)))
            continue
        advice = replace(advice, changes=_with_difference(found, advice.before, after.estimate), after=after)
        if advice.fits(after.estimate):
            break
    return replace(advice, failed=tuple(failed))


def _with_difference(found: tuple[Change, ...], before: Estimate, after: Estimate) -> tuple[Change, ...]:
    """What a change saves, where it is the only one and both runs came to their end."""
    if len(found) > 1 or not before.fits or not after.fits:
        return found
    return (replace(found[0], saves_bytes=before.peak.process_bytes - after.peak.process_bytes),)


def _run(
    asked: Asked, command: list[str], variables: Mapping[str, str], progress: Progress
) -> tuple[Estimate, Facts]:
    """The command on ghosts: of several ranks the first stands for all."""
    alone = asked.cluster.gpus > 1 and launchers.is_launched(command)
    run = dryrun.run(
        command,
        asked.cluster,
        rank=0 if alone else None,
        timeout_seconds=asked.timeout_seconds,
        torch_version=asked.torch_version,
        variables={**os.environ, **variables},
        progress=progress,
    )
    return run.estimate, Facts.of(run.traces[0])
