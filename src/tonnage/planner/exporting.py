"""The plan that an export writes, estimated under the trainer before anything is written.

A plan may have values that the trainer has no setting for.  The nearest ones are written if they fit and are not much
slower; else the best plan that a search finds among those that the trainer can express.

    prepare(case, "llama-3.2-1b", find_target("hf-trainer")).checked
    -> "Under engine hf-trainer: 20.20 GiB of 23.52 GiB on each GPU, 0.664 s a step. ..."
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from tonnage.case import Case
from tonnage.catalog.devices import spell_cluster
from tonnage.catalog.optimizers import find_optimizer
from tonnage.errors import GhostUnavailable, TonnageError, UsageError
from tonnage.estimates import predict
from tonnage.estimates.estimate import Estimate
from tonnage.options import options, replace_checked, spell_option
from tonnage.planner import ask, plan_file
from tonnage.planner.search_space import FAMILIES
from tonnage.planner.settings_file import list_unexpressed
from tonnage.planner.solution import Candidate, Choice, Refused, Solution
from tonnage.shallow.depths import roomy
from tonnage.trainers import engine_of, targets
from tonnage.trainers.target import Export, File, NotExpressed, Target, Unexpressed
from tonnage.units import format_gib

MOST_LOSS: Final = 0.1
"""The part of a step's time that the nearest settings may add before another plan is looked for."""

FILE: Final = "tonnage_plan.toml"
"""The file with the plan as it was written."""

_GIVEN: Final = ("global_batch_tokens", "engine")
"""Options of a search that are not those of the case."""

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """An export and what it needs."""

    export: Export | None
    """The files; None: nothing that the trainer can express fits."""
    checked: str
    """The result of the estimate, or why there is none, in a few sentences."""
    engine: str | None = None
    """The engine of the estimate."""
    estimate: Estimate | None = None
    """The estimate of what is written; None: there is none."""
    planned: Estimate | None = None
    """The estimate of the plan under its own engine; None: there is none."""

    def to_json(self) -> dict[str, Any]:
        """Return the part of the document of `export --json` about the estimates."""
        return {
            "checked": self.checked,
            "engine": self.engine,
            "estimate": _summarize(self.estimate),
            "planned": _summarize(self.planned),
        }


def prepare(
    case: Case,
    model: str,
    to: Target,
    *,
    strict: bool = False,
    check: bool = True,
    offline: bool = False,
    progress: Progress = lambda text: None,
) -> Prepared:
    """Return what an export of a plan writes: the nearest settings, or the best plan of the target's that fits.

    `strict` allows no other value than the plan's; without `check` nothing is estimated.  Raises UsageError where the
    target cannot do the job.
    """
    export, refusal, problem = None, None, ""
    try:
        export = targets.export_plan(case, model, to)
    except NotExpressed as error:
        if strict or not check:
            raise
        refusal, problem = error, f"cannot be written: {str(error).partition('; plan without it')[0].rstrip('.')}"
    if strict and export is not None and export.unexpressed:
        listed = "; ".join(f"{item.option}={item.value} ({item.why})" for item in export.unexpressed)
        raise UsageError(f"{to.name} cannot express {listed}. Nothing was written.")
    written = targets.nearest(case, model, to) if export is None else Case(export.job, export.plan, case.cluster)
    engine = to.find_engine(written.plan)
    unchecked = _explain_unchecked(written, to, engine) if check else "--no-check was given"
    if unchecked or engine is None:
        if refusal is not None:
            raise refusal
        bound = _bound_liger(written, engine, progress) if check and engine is not None else ""
        return Prepared(export=export, checked=f"Not estimated: {unchecked}.{bound}")
    written = replace(written, plan=replace_checked(written.plan, {"engine": engine}))
    try:
        as_planned = case.with_accumulation()
        planned, problem_of_plan = _estimate(as_planned, "the plan", progress)
        prepared = Prepared(export=export, checked="", engine=written.plan.engine, planned=planned)
        if export is not None:
            estimate, problem = planned, problem_of_plan
            if written != as_planned:
                estimate, problem = _estimate(written, f"what is written, under engine {engine}", progress)
            prepared = replace(prepared, estimate=estimate)
            problem = problem or _judge(prepared)
        if problem and not strict:
            return _search(prepared, written, case, model, to, problem, offline=offline, progress=progress)
    except GhostUnavailable as error:
        if refusal is not None:
            raise refusal from error
        return Prepared(export=export, checked=f"Not estimated: {error}")
    if prepared.estimate is None or not prepared.estimate.fits:
        return _refuse(prepared, to, problem)
    return _finish(prepared, case, model, f"They {problem}." if problem else "")


def _explain_unchecked(case: Case, to: Target, engine: str | None) -> str:
    """Return why nothing can be estimated under the target's engine here; empty if it can."""
    if engine is None:
        return f"{to.name} is not run on a ghost"
    case = replace(case, plan=replace_checked(case.plan, {"engine": engine}))
    refusals = engine_of(case.plan).refusals(case)
    if refusals and all(refusal.is_of_here for refusal in refusals):
        return " and ".join(f"{refusal.reason} ({refusal.instead})" for refusal in refusals)
    return ""


def _bound_liger(case: Case, engine: str, progress: Progress) -> str:
    """Return a sentence about the same plan with the plain loss, which needs more, where Liger's cannot be run."""
    plain = replace(case, plan=replace_checked(case.plan, {"engine": engine, "loss": "plain"}))
    if case.plan.loss != "liger" or engine_of(plain.plan).refusals(plain):
        return ""
    estimate, _ = _estimate(plain, "the same with the plain loss", progress)
    return "" if estimate is None else f" With the plain loss, which needs more: {_describe(estimate)}."


def _estimate(case: Case, what: str, progress: Progress) -> tuple[Estimate | None, str]:
    """Return the estimate of a case, or None and what is wrong.  Raises GhostUnavailable."""
    progress(f"estimating {what}")
    try:
        estimate = predict.answer(case, progress=progress).estimate
        if not estimate.fits_card:
            whole = predict.answer(replace(case, cluster=roomy(case.cluster)), progress=progress).estimate
            estimate = replace(estimate, needed=whole.peak if whole.fits_card else None)
        return estimate, ""
    except GhostUnavailable:
        raise
    except TonnageError as error:
        return None, f"cannot be run: {str(error).rstrip('.')}"


def _judge(prepared: Prepared) -> str:
    """Return what is wrong with what is written: it does not fit, or is much slower than the plan."""
    estimate = prepared.estimate
    assert estimate is not None
    if not estimate.fits:
        return f"do not fit: they need {_describe_need(estimate)}"
    loss = _find_loss(estimate, prepared.planned)
    return f"take {100 * loss:.0f} % longer than the plan" if loss > MOST_LOSS else ""


def _find_loss(estimate: Estimate, planned: Estimate | None) -> float:
    """Return how much longer a step takes than that of the plan, as a part of it; 0 where that is not known."""
    before = planned.time.get("step_seconds") if planned is not None and planned.fits else None
    after = estimate.time.get("step_seconds")
    return after / before - 1 if before and after else 0.0


def _search(
    prepared: Prepared,
    nearest: Case,
    case: Case,
    model: str,
    to: Target,
    problem: str,
    *,
    offline: bool,
    progress: Progress,
) -> Prepared:
    """Return the best plan that the target can express, unless the nearest settings fit and are about as fast."""
    settings = _name_settings(prepared.export)
    progress(f"looking for a plan that {to.name} can express, because {settings} {problem}")
    fits = prepared.estimate is not None and prepared.estimate.fits
    for stated in _list_options(nearest, case):
        solution = _ask(model, case, stated, to, offline=offline, progress=progress)
        if solution.plans or fits:
            break
    found = _export_best(solution, case, model, to)
    if found is None and not fits:
        return _refuse(prepared, to, problem, solution)
    if found is None or (fits and _find_loss(found[1], prepared.estimate) > -MOST_LOSS / 2):
        return _finish(prepared, case, model, f"They {problem}, and no other plan of {to.name}'s is faster.")
    export, estimate = found
    chosen = replace(prepared, export=export, estimate=estimate)
    return _finish(chosen, case, model, f"Another plan was taken, because {settings} {problem}.")


def _name_settings(export: Export | None) -> str:
    """Return the subject of a sentence about what would be written."""
    return "the plan's own settings" if export is not None and not export.unexpressed else "the nearest settings"


def _ask(
    model: str, case: Case, stated: dict[str, Any], to: Target, *, offline: bool, progress: Progress
) -> Solution:
    """Return the plans of a search that keeps these options.  Raises GhostUnavailable."""
    try:
        question = ask.ask(model, case.cluster, stated, offline=offline, without=list_unexpressed(to))
        return ask.answer(question, top=1, explain=False, progress=progress)
    except GhostUnavailable:
        raise
    except TonnageError as error:
        return Solution(status="unsupported", question={}, refused=(Refused(what="all", why=str(error)),))


def _list_options(nearest: Case, case: Case) -> Iterator[dict[str, Any]]:
    """Yield the options that a search keeps: the job and its batch, and what it would not choose unasked.

    Then those with AdamW in place of an optimizer that the trainer may have for fewer plans.
    """
    job, plan = nearest.job, nearest.plan
    chosen = ("micro_batch", "grad_accum", "pp_stages", *FAMILIES)
    kept = {
        item.name: getattr(owner, item.name)
        for owner in (job, plan)
        for item, _ in options(type(owner))
        if item.name not in chosen and getattr(owner, item.name) != item.default
    }
    planned = case.with_accumulation()
    kept["global_batch_tokens"] = (
        job.seq_len * planned.job.micro_batch * planned.job.grad_accum * planned.mesh.data_parallel
    )
    kept |= {"precision": plan.precision, "seq_len": job.seq_len, "engine": plan.engine}
    yield {**kept, "optimizer": plan.optimizer}
    if find_optimizer(plan.optimizer).library != "torch":
        yield {**kept, "optimizer": "adamw"}


def _export_best(solution: Solution, case: Case, model: str, to: Target) -> tuple[Export, Estimate] | None:
    """Return the best plan of a search in the target's settings, with all that differs from the user's plan."""
    if not solution.plans:
        return None
    best = solution.plans[0]
    export = targets.export_plan(Case(best.candidate.job, best.candidate.plan, case.cluster), model, to)
    return replace(export, unexpressed=tuple(_list_differences(case, export, to))), best.estimate


def _list_differences(case: Case, export: Export, to: Target) -> Iterator[Unexpressed]:
    """Yield every option with another value than the plan's."""
    planned = case.with_accumulation()
    forced = to.overrides(planned.job, planned.plan)
    for before, after in ((planned.job, export.job), (planned.plan, export.plan)):
        for item, _ in options(type(before)):
            old, new = getattr(before, item.name), getattr(after, item.name)
            if old == new or item.name in _GIVEN:
                continue
            why = f"chosen by a search among the plans of {to.name}"
            if not to.has_setting(item.name, old, item.default):
                why = to.explain(item.name, old)
            elif item.name in forced:
                why, _ = forced[item.name]
            yield Unexpressed(
                option=spell_option(item.name),
                value=targets.spell_value(old),
                why=why,
                instead=targets.spell_value(new),
            )


def _finish(prepared: Prepared, case: Case, model: str, remark: str = "") -> Prepared:
    """Return an export that fits, with its plan as a file and the numbers as sentences."""
    export, estimate, planned = prepared.export, prepared.estimate, prepared.planned
    assert export is not None
    assert estimate is not None
    assert prepared.engine is not None
    candidate = Candidate(job=export.job, plan=replace_checked(export.plan, {"engine": prepared.engine}))
    choice = Choice(name=f"for {export.target}", candidate=candidate, estimate=estimate)
    gpu, gpu_memory_bytes = spell_cluster(case.cluster)
    text = plan_file.text(
        choice,
        gpu=gpu,
        gpu_memory_bytes=gpu_memory_bytes,
        host_memory_bytes=case.cluster.host_memory_bytes,
        model=plan_file.found_anywhere(model),
    )
    sentences = [f"Under engine {prepared.engine}: {_describe(estimate)}."]
    if planned is not None and (planned.job, planned.plan) != (estimate.job, estimate.plan):
        sentences.append(f"The plan, under engine {case.plan.engine}: {_describe(planned)}.")
    return replace(
        prepared,
        export=replace(export, files=(*export.files, File(name=FILE, text=text))),
        checked=" ".join([*sentences, *([remark] if remark else [])]),
    )


def _refuse(prepared: Prepared, to: Target, problem: str, solution: Solution | None = None) -> Prepared:
    """Return the answer that nothing is written, because nothing fits.

    Raises UsageError where no plan of the target's was run.
    """
    settings = _name_settings(prepared.export)
    if solution is not None and solution.status != "too_large":
        reasons = [refused.why.rstrip(".") for refused in solution.refused]
        said = [f"{to.name}: {settings} {problem}", *(why for why in reasons[:1] if why not in problem)]
        raise UsageError(f"{'; a search: '.join(said)}. Nothing was written; --no-check writes them all the same.")
    nearest = None if solution is None else solution.nearest
    smallest = "" if nearest is None else f"; the smallest needs {format_gib(nearest.needed_bytes)}"
    none = "" if solution is None else f", and no plan that {to.name} can express fits{smallest}"
    return replace(
        prepared, export=None, checked=f"{settings[0].upper()}{settings[1:]} {problem}{none}. Nothing was written."
    )


def _describe(estimate: Estimate) -> str:
    """Return peak and seconds of an estimate."""
    if not estimate.fits:
        return f"does not fit, it needs {_describe_need(estimate)}"
    seconds = estimate.time.get("step_seconds")
    return f"{_describe_need(estimate)} on each GPU" + (f", {seconds:.3g} s a step" if seconds else "")


def _describe_need(estimate: Estimate) -> str:
    """Return the peak of all steps beside the card's memory, or that of the host beside a machine's."""
    host = estimate.host
    if not estimate.fits and estimate.fits_card and host.machine_bytes is not None and host.limit_bytes is not None:
        return f"{format_gib(host.machine_bytes)} of host memory, and a machine has {format_gib(host.limit_bytes)}"
    peak, capacity = estimate.peak.process_bytes, format_gib(estimate.cluster["capacity_bytes"])
    if estimate.fits or estimate.needed_bytes is not None:
        return f"{format_gib(estimate.needed_bytes or peak)} of {capacity}"
    return f"more than {format_gib(peak)} of {capacity}"


def _summarize(estimate: Estimate | None) -> dict[str, Any] | None:
    """Return the numbers of an estimate."""
    if estimate is None:
        return None
    return {
        "fits": estimate.fits,
        "peak_bytes": estimate.needed_bytes or estimate.peak.process_bytes,
        "capacity_bytes": estimate.cluster["capacity_bytes"],
        "step_seconds": estimate.time.get("step_seconds"),
    }
