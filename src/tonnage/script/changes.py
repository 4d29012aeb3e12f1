"""From what a script does to what a plan says: which settings to change, and what each of them is for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from tonnage.allocator.settings import variable
from tonnage.errors import CannotEstimate
from tonnage.planner.pricing import price_candidate
from tonnage.planner.probe import Need
from tonnage.planner.reasons import EFFECTS, EFFECTS_OF_VALUES
from tonnage.planner.solution import Candidate
from tonnage.script.command import can_say, flag
from tonnage.script.facts import Facts, Understood, checkpointing_word
from tonnage.script.launchers import is_accelerated
from tonnage.trainers.hf_trainer import run as hf_trainer

if TYPE_CHECKING:
    from tonnage.planner.question import Question
    from tonnage.planner.trial_runner import Failure, TrialRunner

Where = Literal["flag", "launcher", "argument", "environment"]

LAUNCHERS: Final = ("mixed_precision",)
"""What `accelerate launch` says to a loop that does not say it itself, by the name of its flag."""

GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "allocator": ("allocator",),
    "optimizer": ("optimizer",),
    "precision": ("precision",),
    "shard": ("shard", "param_offload"),
    "checkpointing": ("checkpointing", "activation_offload"),
    "batch": ("micro_batch", "grad_accum"),
}
"""Options of Job and Plan that change together, because the script's settings say them together."""

WHY: Final[Mapping[str, str]] = {
    **EFFECTS,
    "precision": "matrix products run in fewer bits: rounds differently",
    "batch": "as many sequences a step, in other portions",
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of the script."""

    name: str
    """Of TrainingArguments, or of the environment."""
    before: Any
    """What it is now."""
    after: Any
    """What it should be; None: left out."""
    where: Where
    """`flag`: on the command line; `launcher`: on that of `accelerate launch`; `argument`: where the script makes its
    arguments; `environment`."""
    flag: str | None = None
    """As the command line calls it."""
    parts: Mapping[str, Any] | None = None
    """Of a setting with parts those that this change is about."""

    def __str__(self) -> str:
        name = self.flag or self.name
        if self.where == "environment":
            return f"{name}={self.after}"
        if self.parts is not None:
            return f"{name}: {', '.join(f'{part} {_shown(value)}' for part, value in self.parts.items())}"
        return f"{name}: {_shown(self.before)} -> {_shown(self.after)}"


@dataclass(frozen=True, kw_only=True)
class Change:
    """What changes together, and what for."""

    technique: str
    """A key of GROUPS."""
    settings: tuple[Setting, ...]
    """In the script's own words."""
    why: str
    """What it does."""
    saves_bytes: int | None
    """Peak process memory of the plan with this as the script has it now, less that of the plan; None: not run."""
    costs_seconds: float | None
    """Seconds of a step, likewise the other way round: negative where the change is faster; None: not known."""


def changes(
    now: Understood, best: Candidate, facts: Facts, question: Question, runner: TrialRunner, command: Sequence[str]
) -> tuple[Change, ...]:
    """What lies between the script and a plan, each taken back on its own and run again; what is for nothing is not
    said."""
    groups = [name for name in GROUPS if _taken_back(name, now, best) != best]
    without = [_taken_back(name, now, best) for name in groups]
    needs = runner.probe([best, *without], question.cluster)
    found = []
    for name, candidate, need in zip(groups, without, needs[1:], strict=True):
        settings = tuple(_settings(name, candidate, best, facts, command))
        change = Change(
            technique=name,
            settings=settings,
            why=EFFECTS_OF_VALUES.get(str(getattr(best.plan, name, None)), WHY[name]),
            saves_bytes=saved(need, needs[0]),
            costs_seconds=difference(best, candidate, question),
        )
        if settings and not _is_for_nothing(change):
            found.append(change)
    return tuple(found)


def _is_for_nothing(change: Change) -> bool:
    """Whether more is needed with it, and no less time."""
    return change.saves_bytes is not None and change.saves_bytes < 0 and (change.costs_seconds or 0.0) >= 0


def _taken_back(group: str, now: Understood, best: Candidate) -> Candidate:
    """The plan with the options of one group as the script has them."""
    job, plan = best.job, best.plan
    for name in GROUPS[group]:
        if hasattr(plan, name):
            plan = replace(plan, **{name: getattr(now.plan, name)})
        else:
            job = replace(job, **{name: getattr(now.job, name)})
    return Candidate(job=job, plan=plan)


def seconds(candidate: Candidate, question: Question) -> float | None:
    """Of a step, by the time model; None where it knows nothing of the network or the card."""
    try:
        timing = price_candidate(candidate, question.cluster).timing
    except CannotEstimate:
        return None
    return None if timing is None else timing.step_seconds


def saved(without: Need | Failure, with_it: Need | Failure) -> int | None:
    """Bytes less at the peak; None where one of them could not be run."""
    if isinstance(without, Need) and isinstance(with_it, Need):
        return without.process_bytes - with_it.process_bytes
    return None


def difference(best: Candidate, without: Candidate, question: Question) -> float | None:
    """Seconds of a step more than without; None where they are not known."""
    after, before = seconds(best, question), seconds(without, question)
    return None if after is None or before is None else after - before


def _settings(
    group: str, without: Candidate, best: Candidate, facts: Facts, command: Sequence[str]
) -> Iterator[Setting]:
    if group == "allocator":
        yield expandable(facts)
        return
    before, after = said(without, facts), said(best, facts)
    for name in dict.fromkeys([*before, *after]):
        value = after.get(name)
        nothing = (not value and name.endswith("_kwargs")) or holds(facts.settings.get(name), value)
        if before.get(name) != value and not nothing:
            yield replace(setting(name, value, facts, command), parts=_parts(before.get(name), value))


def _parts(before: Any, after: Any) -> Mapping[str, Any] | None:
    """What differs between two values with parts."""
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return None
    return {name: value for name, value in after.items() if before.get(name) != value}


def holds(found: Any, wanted: Any) -> bool:
    """Whether a setting is as it was meant; of one with parts, those that were given."""
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and all(holds(found.get(name), inner) for name, inner in wanted.items())
    return bool(found == wanted) or not (found or wanted)


def said(candidate: Candidate, facts: Facts) -> dict[str, Any]:
    """Settings that say so much of a plan: TrainingArguments; of a loop with accelerate, what stands for them."""
    job, plan = candidate.job, candidate.plan
    if not facts.is_loop:
        return hf_trainer.arguments(job, plan, checkpointing_word(facts))
    return {
        "per_device_train_batch_size": job.micro_batch,
        "gradient_accumulation_steps": job.grad_accum,
        "mixed_precision": plan.compute_dtype if plan.precision.endswith("-mixed") else "no",
        "gradient_checkpointing": plan.checkpointing == "full",
        "fused": plan.optimizer == "adamw-fused",
    }


def expandable(facts: Facts) -> Setting:
    """The allocator's variable, with what it said before."""
    return Setting(
        name=variable(facts.torch_version),
        before=facts.allocator_settings or None,
        after=",".join(filter(None, [facts.allocator_settings, "expandable_segments:True"])),
        where="environment",
    )


def setting(name: str, value: Any, facts: Facts, command: Sequence[str]) -> Setting:
    """A setting of TrainingArguments, in the script's own flag where it has one, else in its launcher's."""
    known = [word for word in _aliases(name) if flag(word, facts.options, command) is not None]
    called = next((word for word in known if flag(word, facts.options, command) in command), next(iter(known), name))
    where: Where = "argument"
    said_by: str | None = None
    if can_say(called, value, facts.options, command):
        where, said_by = "flag", flag(called, facts.options, command)
    elif facts.is_loop and called in LAUNCHERS and called not in facts.given and is_accelerated(command):
        where, said_by = "launcher", f"--{called}"
    return Setting(name=called, before=facts.settings.get(name), after=value, where=where, flag=said_by)


def _aliases(name: str) -> tuple[str, ...]:
    """transformers' two names of checkpointing: a command line may know the older one only."""
    return (name, name.replace("activation_", "gradient_"))


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)
