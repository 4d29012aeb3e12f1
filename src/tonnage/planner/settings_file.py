"""A trainer's settings file beside the best plan: the memory that it needs, and which of its settings to change.

For a DeepSpeed file with ZeRO-3, if the best plan needs only ZeRO-2:

    zero_optimization.stage = 2 (now 3)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from tonnage.case import Case
from tonnage.errors import TonnageError
from tonnage.estimates import predict
from tonnage.options import spell_option
from tonnage.trainers import cases
from tonnage.units import format_gib

if TYPE_CHECKING:
    from tonnage.cluster import Cluster
    from tonnage.estimates.estimate import Estimate
    from tonnage.job import Job
    from tonnage.planner.solution import Candidate
    from tonnage.plans import Plan
    from tonnage.trainers.reading import TrainerConfig
    from tonnage.trainers.target import Target

SCRIPTS: Final = "job."
"""Prefix of the names of settings that belong in the training script; the trainer's file has none for them."""

_NEWER: Final = {"gradient_checkpointing": "activation_checkpointing"}
"""Present name of each setting of the Trainer that older files call by another name."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One setting to change."""

    key: str
    """The target's own name of the setting; the prefix `SCRIPTS` marks a setting of the script."""
    before: Any
    """Value in the file; None if the file does not set it."""
    after: Any
    """Value in the best plan; None if the plan does not set it."""

    def __str__(self) -> str:
        key = self.key.removeprefix(SCRIPTS)
        name = f"in your script, {key}" if key != self.key else key
        if self.after is None:
            return f"{name}: leave it out (now {self.before})"
        return f"{name} = {self.after}" + ("" if self.before is None else f" (now {self.before})")


@dataclass(frozen=True, kw_only=True)
class FileComparison:
    """A trainer's settings file compared with the best plan for the same job."""

    given: TrainerConfig
    """The settings file."""
    estimate: Estimate | None
    """The estimate of exactly the settings of the file; None if they cannot be run."""
    refusal: str | None
    """The reason why they cannot be run."""
    changes: tuple[Change, ...]
    """Settings to change; empty if no plan was found or the file is the best one already."""
    silent: Mapping[str, str]
    """Assumption for each option that neither the file nor the user sets."""

    def to_json(self) -> dict[str, Any]:
        """Return the part `given` of the document that `plan --from FILE --json` prints."""
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
        """Return the text that `plan --from FILE` prints below the plans."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield ""
        if self.estimate is not None:
            peak, capacity = (
                format_gib(self.estimate.peak.process_bytes),
                format_gib(self.estimate.cluster["capacity_bytes"]),
            )
            if self.estimate.fits_card:
                yield f"The {self.given.target} file as it is fits: {peak} of {capacity} on each GPU."
                if not self.estimate.host.fits:
                    yield f"  {self.estimate.verdict()}."
            else:  # the peak is that before the allocation that failed
                yield f"The {self.given.target} file as it is does not fit: it needs more than {peak} of {capacity}."
        else:
            yield f"The {self.given.target} file as it is cannot be run here: {self.refusal}"
        yield from (f"  {option}: {line}" for option, line in self.silent.items())
        if self.changes:
            yield "Change for the best plan:"
        for change in self.changes:
            yield f"  {change}"
        if self.given.not_understood:
            yield "Not understood, and left out of the estimate:"
        yield from (f"  {line}" for line in self.given.not_understood)


def beside(
    given: TrainerConfig,
    stated: Mapping[str, Any],
    model: str,
    cluster: Cluster,
    best: Candidate | None,
    *,
    offline: bool = False,
    torch_version: str | None = None,
    progress: Any = lambda text: None,
) -> FileComparison:
    """Run the settings of the file, overridden by those that the user `stated`; compare them with the best plan."""
    options = given.exactly(stated, cluster.gpus)
    silent = {option: line for option, line in given.silent.items() if option not in stated}
    estimate, refusal = None, None
    try:
        case = cases.make_case(model, cluster, options, offline=offline)
        estimate = predict.answer(case, torch_version=torch_version, progress=progress).estimate
    except TonnageError as error:
        refusal = str(error)
    changes = () if best is None else tuple(_list_changes(given, options, best, model, cluster, offline))
    return FileComparison(given=given, estimate=estimate, refusal=refusal, changes=changes, silent=silent)


def _list_changes(
    given: TrainerConfig, options: Mapping[str, Any], best: Candidate, model: str, cluster: Cluster, offline: bool
) -> Iterator[Change]:
    """Yield the settings of the target that differ between the file and the best plan.

    A part of the plan that the target has no setting for is not among them; the listing of the plan shows it.
    """
    try:
        planned = _export_settings(given, best.job, best.plan, model, cluster)
        present = _export_settings(given, *cases.request(model, offline=offline, **options), model, cluster)
    except TonnageError:
        return
    renamed = {_NEWER[key] for key in given.document if key in _NEWER}
    for key in dict.fromkeys([*planned, *present]):
        if key in renamed:
            continue  # listed below, by the name that the file has
        before, after = given.document.get(key, present.get(key)), planned.get(key)
        if after is None and key not in given.document and not key.startswith(SCRIPTS):
            continue  # the file has no such setting to leave out
        if present.get(key) != after and before != after:  # the file may have the planned value, under our default
            yield Change(key=key, before=before, after=after)
    for option, key in given.keys.items():  # keys of the file that an export writes under another name
        if key in given.document and key not in {*planned, *present} and _is_changed(option, options, best):
            after = planned.get(_NEWER.get(key, "")) or None
            if after != given.document[key]:
                yield Change(key=key, before=given.document[key], after=after)


def _is_changed(option: str, options: Mapping[str, Any], best: Candidate) -> bool:
    """Return True if the file sets an option and the best plan has another value of it."""
    chosen = getattr(best.job if hasattr(best.job, option) else best.plan, option)
    return option in options and bool(options[option] != chosen)


def wordless(given: TrainerConfig) -> tuple[str, ...]:
    """Return the options and values that the target has no setting for, so that a search can leave them out.

    If the file names an engine, the engine itself refuses them and nothing is returned.
    """
    from tonnage.trainers import targets

    return () if "engine" in given.options else list_unexpressed(targets.find_target(given.target))


def list_unexpressed(target: Target) -> tuple[str, ...]:
    """Return the options and values of a search that the target has no setting for, as `--without` takes them."""
    from tonnage.planner.search_space import AXES, FREE, LOSSES, ORDER
    from tonnage.plans import Plan
    from tonnage.timing.scores import SPARING

    default = Plan()
    pairs = [(name, value) for name, values in ORDER.items() for value in values]
    pairs += [
        *FREE.items(),
        *(("loss", value) for value in LOSSES),
        *(("attention", value) for value in SPARING),
        *((name, 2) for name in AXES),
        ("checkpointing", "budget=1GiB"),
    ]
    missing = [pair for pair in pairs if not target.has_setting(*pair, getattr(default, pair[0]))]
    return tuple(
        spell_option(name) if isinstance(value, bool | int) else f"{spell_option(name)}={value.partition('=')[0]}"
        for name, value in missing
    )


def _export_settings(given: TrainerConfig, job: Job, plan: Plan, model: str, cluster: Cluster) -> Mapping[str, Any]:
    """Return a plan as settings of the file's target, and the environment variables that it needs."""
    from tonnage.techniques import environment
    from tonnage.trainers import targets

    exported = targets.export_plan(Case(job, plan, cluster), model, targets.find_target(given.target))
    variables = {f"{name} (environment)": value for name, value in environment(plan).items()}
    return {**exported.settings, **variables}
