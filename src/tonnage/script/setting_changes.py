"""The settings of a script that a plan changes, and what each change saves and costs.

--per_device_train_batch_size: 4 -> 2
--gradient_accumulation_steps: 4 -> 8      saves 14.87 GiB, costs 0.173 s: one SettingChange with two Settings
"""

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
from tonnage.script.command import can_set, find_flag
from tonnage.script.facts import Facts, Understood, checkpointing_word
from tonnage.script.launchers import is_accelerated
from tonnage.trainers.hf_trainer import run as hf_trainer

if TYPE_CHECKING:
    from tonnage.planner.question import Question
    from tonnage.planner.trial_runner import Failure, TrialRunner

Where = Literal["flag", "launcher", "argument", "environment"]
"""Place of a setting, described at `Setting.where`."""

LAUNCHERS: Final = ("mixed_precision",)
"""Settings that `accelerate launch` gives a loop that does not set them itself, by the names of its flags."""

BATCH: Final = ("per_device_train_batch_size", "gradient_accumulation_steps")
"""Settings whose product is the number of sequences of a step on each GPU."""

GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "allocator": ("allocator",),
    "optimizer": ("optimizer",),
    "precision": ("precision",),
    "shard": ("shard", "param_offload"),
    "checkpointing": ("checkpointing", "activation_offload"),
    "batch": ("micro_batch", "grad_accum"),
}
"""Options of Job and Plan that change together, because the same settings of the script decide them."""

WHY: Final[Mapping[str, str]] = {
    **EFFECTS,
    "precision": "matrix products run in fewer bits, which rounds differently",
    "batch": "as many sequences a step, in other micro-batches",
    "rows": "fewer sequences a step, which changes what is trained: the script has no flag for accumulation",
}
"""Effect of each group, in words."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of the script."""

    name: str
    """Name in TrainingArguments, or of the environment variable."""
    before: Any
    """Present value."""
    after: Any
    """Planned value; None: leave the setting out."""
    where: Where
    """Place of the setting.

    `flag`: the script's command line; `launcher`: that of `accelerate launch`; `argument`: the code in which the
    script makes its arguments; `environment`: a variable.
    """
    flag: str | None = None
    """Name on the command line."""
    parts: Mapping[str, Any] | None = None
    """The parts that change, of a setting that is a mapping."""

    @property
    def word(self) -> str:
        """Return its name, or the flag if that has another one."""
        flag = self.flag or ""
        return flag if flag and flag.lstrip("-").replace("-", "_") != self.name else self.name

    def __str__(self) -> str:
        name = self.flag or self.name
        if self.where == "environment":
            return f"{name}={self.after}"
        if self.parts is not None:
            return f"{name}: {', '.join(f'{part} {_describe_value(value)}' for part, value in self.parts.items())}"
        return f"{name}: {_describe_value(self.before)} -> {_describe_value(self.after)}"


@dataclass(frozen=True, kw_only=True)
class Change:
    """Settings that change together, and the effect."""

    technique: str
    """A key of WHY."""
    settings: tuple[Setting, ...]
    """The settings, by the script's own names."""
    why: str
    """The effect, in words."""
    saves_bytes: int | None
    """Peak process memory of the plan without this change, less that of the plan; None: not run."""
    costs_seconds: float | None
    """Step seconds of the plan, less those without this change: negative if the change is faster; None: not known."""


def list_changes(
    now: Understood, best: Candidate, facts: Facts, question: Question, runner: TrialRunner, command: Sequence[str]
) -> tuple[Change, ...]:
    """Return the changes from the script to a plan, each with its own effect.

    The effect of a change is measured by running the plan without it.  Changes that need more
    memory and save no time are left out.
    """
    present = Candidate(job=now.job, plan=now.plan)
    groups = [name for name in GROUPS if _revert_group(name, present, best) != best]
    reverted = [_revert_group(name, present, best) for name in groups]
    needs = runner.probe([best, *reverted], question.cluster)
    changes = []
    for name, candidate, need in zip(groups, reverted, needs[1:], strict=True):
        settings = tuple(_list_settings(name, candidate, best, facts, command))
        change = Change(
            technique=name,
            settings=settings,
            why=EFFECTS_OF_VALUES.get(str(getattr(best.plan, name, None)), WHY[name]),
            saves_bytes=compute_saved_bytes(need, needs[0]),
            costs_seconds=compute_added_seconds(best, candidate, question),
        )
        if settings and not _is_useless(change):
            changes.append(change)
    return tuple(changes)


def list_setting_changes(now: Candidate, best: Candidate, facts: Facts, command: Sequence[str]) -> tuple[Change, ...]:
    """Return the changes from the script to a candidate, without their effects."""
    changes = []
    for name in GROUPS:
        without = _revert_group(name, now, best)
        settings = () if without == best else tuple(_list_settings(name, without, best, facts, command))
        if settings:
            changes.append(
                Change(technique=name, settings=settings, why=WHY[name], saves_bytes=None, costs_seconds=None)
            )
    return tuple(changes)


def _is_useless(change: Change) -> bool:
    """Return True for a change that needs more memory and saves no time."""
    return change.saves_bytes is not None and change.saves_bytes < 0 and (change.costs_seconds or 0.0) >= 0


def _revert_group(group: str, now: Candidate, best: Candidate) -> Candidate:
    """Return the plan with the options of one group as the script has them now."""
    job, plan = best.job, best.plan
    for name in GROUPS[group]:
        if hasattr(plan, name):
            plan = replace(plan, **{name: getattr(now.plan, name)})
        else:
            job = replace(job, **{name: getattr(now.job, name)})
    return Candidate(job=job, plan=plan)


def price_step(candidate: Candidate, question: Question) -> float | None:
    """Return the seconds of a step by the time model; None if it does not know the network or the GPU."""
    try:
        timing = price_candidate(candidate, question.cluster).timing
    except CannotEstimate:
        return None
    return None if timing is None else timing.step_seconds


def compute_saved_bytes(without: Need | Failure, with_it: Need | Failure) -> int | None:
    """Return the bytes that the peak is lower with a change; None if one of the two could not be run."""
    if isinstance(without, Need) and isinstance(with_it, Need):
        return without.process_bytes - with_it.process_bytes
    return None


def compute_added_seconds(best: Candidate, without: Candidate, question: Question) -> float | None:
    """Return the seconds that a step takes longer than `without`; None if they are not known."""
    after, before = price_step(best, question), price_step(without, question)
    return None if after is None or before is None else after - before


def _list_settings(
    group: str, without: Candidate, best: Candidate, facts: Facts, command: Sequence[str]
) -> Iterator[Setting]:
    """Yield the settings of the script that one group of options changes."""
    if group == "allocator":
        yield make_expandable_setting(facts)
        return
    before, after = _convert_to_settings(without, facts), _convert_to_settings(best, facts)
    for name in dict.fromkeys([*before, *after]):
        value = after.get(name)
        is_set = (not value and name.endswith("_kwargs")) or has_value(facts.settings.get(name), value)
        if before.get(name) != value and not is_set:
            yield replace(make_setting(name, value, facts, command), parts=_changed_parts(before.get(name), value))


def _changed_parts(before: Any, after: Any) -> Mapping[str, Any] | None:
    """Return the parts that differ between two mappings; None for other values."""
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return None
    return {name: value for name, value in after.items() if before.get(name) != value}


def has_value(value: Any, wanted: Any) -> bool:
    """Return True if a setting has the wanted value; of a mapping, only the parts in `wanted` are compared."""
    if isinstance(wanted, Mapping):
        return isinstance(value, Mapping) and all(has_value(value.get(name), part) for name, part in wanted.items())
    return bool(value == wanted) or not (value or wanted)


def _convert_to_settings(candidate: Candidate, facts: Facts) -> dict[str, Any]:
    """Return a plan as TrainingArguments or, for a loop with accelerate, as the settings in their place."""
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


def make_expandable_setting(facts: Facts) -> Setting:
    """Return the allocator's variable with expandable segments added to its present value."""
    return Setting(
        name=variable(facts.torch_version),
        before=facts.allocator_settings or None,
        after=",".join(filter(None, [facts.allocator_settings, "expandable_segments:True"])),
        where="environment",
    )


def make_setting(name: str, value: Any, facts: Facts, command: Sequence[str]) -> Setting:
    """Return a setting of TrainingArguments, set by the script's own flag if it has one, else by its launcher's."""
    present = facts.settings.get(name)
    flags = {alias: find_flag(alias, facts.options, command, present) for alias in _aliases(name)}
    known = [alias for alias, flag in flags.items() if flag is not None]
    alias = next((alias for alias in known if flags[alias] in command), next(iter(known), name))
    where: Where = "argument"
    flag: str | None = None
    if can_set(flags[alias], value, facts.options, command):
        where, flag = "flag", flags[alias]
    elif facts.is_loop and alias in LAUNCHERS and alias not in facts.given and is_accelerated(command):
        where, flag = "launcher", f"--{alias}"
    return Setting(name=alias, before=present, after=value, where=where, flag=flag)


def _aliases(name: str) -> tuple[str, ...]:
    """Return transformers' two names of a setting of checkpointing: a command line may know only the older one."""
    return (name, name.replace("activation_", "gradient_"))


def _describe_value(value: Any) -> str:
    return "not set" if value is None else str(value)
