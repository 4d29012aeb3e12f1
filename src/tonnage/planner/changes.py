"""A trainer's file that was read in: what it would use, and what to change in it, by its own names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from tonnage.case import Case
from tonnage.errors import TonnageError
from tonnage.estimates import predict
from tonnage.options import spelled
from tonnage.trainers import cases
from tonnage.units import gib

if TYPE_CHECKING:
    from tonnage.cluster import Cluster
    from tonnage.estimates.estimate import Estimate
    from tonnage.job import Job
    from tonnage.planner.solution import Candidate
    from tonnage.plans import Plan
    from tonnage.trainers.reading import TrainerConfig

SCRIPTS: Final = "job."
"""What stands before the names of settings that are a script's, which the trainer's file has no place for."""

_NEWER: Final = {"gradient_checkpointing": "activation_checkpointing"}
"""What settings of the Trainer's are called now, by the names that older files use."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One setting to change."""

    key: str
    """The target's own name; `SCRIPTS` stands before what its script says."""
    before: Any
    """What the file says; None where it is silent."""
    after: Any
    """What the best plan says; None where it does not."""

    def __str__(self) -> str:
        named = f"in your script, {key}" if (key := self.key.removeprefix(SCRIPTS)) != self.key else key
        if self.after is None:
            return f"{named}: leave it out (now {self.before})"
        return f"{named} = {self.after}" + ("" if self.before is None else f" (now {self.before})")


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A file beside the best plan for the same job."""

    given: TrainerConfig
    """The file."""
    estimate: Estimate | None
    """Of exactly what it says; None where that cannot be run."""
    refusal: str | None
    """Why it cannot."""
    changes: tuple[Change, ...]
    """What to change; empty where no plan was found, or the file says the best one already."""
    silent: Mapping[str, str]
    """What the file does not say, nor anybody else, and is only likely."""

    def to_json(self) -> dict[str, Any]:
        """As in `plan --from FILE --json`."""
        return {
            "target": self.given.target,
            "options": dict(self.given.options),
            "not_understood": list(self.given.not_understood),
            "silent": dict(self.silent),
            "estimate": None if self.estimate is None else self.estimate.to_json(),
            "refusal": self.refusal,
            "changes": [asdict(change) for change in self.changes],
        }

    def text(self) -> str:
        """As `plan --from FILE` prints it below the plans."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield ""
        if self.estimate is not None:
            fits = "fits," if self.estimate.fits else "does not fit, more than"  # it asked for more than it got
            peak, capacity = self.estimate.peak.process_bytes, self.estimate.cluster["capacity_bytes"]
            yield f"As the file of {self.given.target} is: {fits} {gib(peak)} of {gib(capacity)} a GPU."
        else:
            yield f"As the file of {self.given.target} is, it cannot be run here: {self.refusal}"
        yield from (f"  {option}: {line}" for option, line in self.silent.items())
        if self.changes:
            yield "What to change for the best plan:"
        for change in self.changes:
            yield f"  {change}"
        if self.given.not_understood:
            yield "Not understood, and not counted:"
        yield from (f"  {line}" for line in self.given.not_understood)


def beside(
    given: TrainerConfig,
    said: Mapping[str, Any],
    model: str,
    cluster: Cluster,
    best: Candidate | None,
    *,
    offline: bool = False,
    torch_version: str | None = None,
    progress: Any = lambda text: None,
) -> Beside:
    """Run what the file says, and compare its settings with those of the best plan."""
    exactly = given.exactly(said, cluster.gpus)
    silent = {option: line for option, line in given.silent.items() if option not in said}

    def changes() -> tuple[Change, ...]:
        return () if best is None else tuple(_changes(given, exactly, best, model, cluster, offline))

    try:
        case = cases.ask(model, cluster, exactly, offline=offline)
        found = predict.answer(case, torch_version=torch_version, progress=progress).estimate
    except TonnageError as error:
        return Beside(given=given, estimate=None, refusal=str(error), changes=changes(), silent=silent)
    return Beside(given=given, estimate=found, refusal=None, changes=changes(), silent=silent)


def _changes(
    given: TrainerConfig, exactly: Mapping[str, Any], best: Candidate, model: str, cluster: Cluster, offline: bool
) -> Iterator[Change]:
    """Both said in the target's words, and compared; what it has no words for, the plan's own listing shows."""
    try:
        wanted = _settings(given, best.job, best.plan, model, cluster)
        found = _settings(given, *cases.request(model, offline=offline, **exactly), model, cluster)
    except TonnageError:
        return
    older = {_NEWER[key] for key in given.document if key in _NEWER}
    for key in dict.fromkeys([*wanted, *found]):
        if key in older:
            continue  # told below, by the name that the file has
        before, after = given.document.get(key, found.get(key)), wanted.get(key)
        if after is None and key not in given.document and not key.startswith(SCRIPTS):
            continue  # nothing of the file's that could be left out
        if found.get(key) != after and before != after:  # a default of ours may be said already
            yield Change(key=key, before=before, after=after)
    for option, key in given.keys.items():  # another name for what the target calls otherwise where it is written
        if key in given.document and key not in {*wanted, *found} and _differs(option, exactly, best):
            after = wanted.get(_NEWER.get(key, "")) or None
            if after != given.document[key]:
                yield Change(key=key, before=given.document[key], after=after)


def _differs(option: str, exactly: Mapping[str, Any], best: Candidate) -> bool:
    """Whether the best plan has another value of an option than the file."""
    chosen = getattr(best.job if hasattr(best.job, option) else best.plan, option)
    return option in exactly and bool(exactly[option] != chosen)


def wordless(given: TrainerConfig) -> tuple[str, ...]:
    """What a search must leave out, for the target to have words for its plans; nothing where an engine says so."""
    from tonnage.planner.values import AXES, FREE, ORDER
    from tonnage.plans import Plan
    from tonnage.timing.scores import SPARING
    from tonnage.trainers import export as exports

    if "engine" in given.options:
        return ()
    target = exports.target(given.target)
    default = Plan()
    values = [(name, value) for name, several in ORDER.items() for value in several]
    values += [
        *FREE.items(),
        *(("attention", value) for value in SPARING),
        *((name, 2) for name in AXES),
        ("checkpointing", "budget=1GiB"),
    ]
    missing = [pair for pair in values if not target.has_words(*pair, getattr(default, pair[0]))]
    return tuple(
        spelled(name) if isinstance(value, bool | int) else f"{spelled(name)}={value.partition('=')[0]}"
        for name, value in missing
    )


def _settings(given: TrainerConfig, job: Job, plan: Plan, model: str, cluster: Cluster) -> Mapping[str, Any]:
    from tonnage.techniques import environment
    from tonnage.trainers import export as exports

    made = exports.export(Case(job, plan, cluster), model, exports.target(given.target))
    around = {f"{name} (environment)": value for name, value in environment(plan).items()}
    return {**made.settings, **around}
