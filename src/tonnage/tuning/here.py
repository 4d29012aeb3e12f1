"""Tuning on this machine: where it starts, what it tries, and what later predictions learn from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.cluster import CPU, HERE
from tonnage.errors import TonnageError, UsageError
from tonnage.estimates import history
from tonnage.estimates.predict import estimate as predict
from tonnage.planner import ask, plan_file
from tonnage.planner.describe import describe
from tonnage.planner.solution import Candidate
from tonnage.techniques import refusals
from tonnage.train import checks
from tonnage.trainers.cases import request
from tonnage.tuning import decisions
from tonnage.tuning.trials import Trials

if TYPE_CHECKING:
    from tonnage.cluster import Cluster
    from tonnage.planner.plan_file import PlanFile
    from tonnage.tuning.decisions import Trial, Tuned

Starts = list[tuple[str, Candidate]]
"""Names and candidates, the most promising first."""

SHOWN: Final = 3
"""Predicted plans that are tried."""


def from_file(saved: PlanFile, stated: Mapping[str, Any], *, offline: bool) -> Starts:
    """Return the plan of a file as the only start; `stated` options override it."""
    job, plan = request(saved.network(None), offline=offline, **saved.under(stated))
    return [("the plan of the file", Candidate(job=job, plan=plan))]


def from_model(
    model: str, cluster: Cluster, stated: Mapping[str, Any], progress: Callable[[str], None], *, offline: bool
) -> Starts:
    """Return the fastest plans by prediction; the plain loop if none is predicted to fit, and on the CPU."""
    if cluster.device.id != CPU:
        solution = ask.answer(
            ask.ask(model, cluster, stated, offline=offline), top=SHOWN, pareto=False, progress=progress
        )
        if solution.plans:
            return [(f"predicted {rank}", choice.candidate) for rank, choice in enumerate(solution.plans, 1)]
    job, plan = request(model, offline=offline, **stated)
    why = "baseline" if cluster.device.id == CPU else "baseline, since no plan is predicted to fit"
    return [(why, Candidate(job=job.on_ranks(cluster.gpus), plan=plan))]


def is_possible(candidate: Candidate, cluster: Cluster) -> bool:
    """Return True if no technique of the plan refuses the job on these GPUs."""
    try:
        return not refusals(Case(candidate.job, candidate.plan, cluster))
    except TonnageError:
        return False


def tune_here(
    model_or_plan: str,
    options: Mapping[str, Any],
    *,
    out: Path,
    gpu: str | None = None,
    gpus: int | None = None,
    trials: int = 12,
    steps: int = 20,
    timeout_seconds: float = 900.0,
    forget: bool = False,
    offline: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Tuned:
    """Return the trials of a model or a plan file on this machine's devices; `tonnage.api.tune` explains the options.

    Raises UsageError if the devices are not here.
    """
    starts, cluster, model = _find_starts(model_or_plan, gpu, gpus, options, progress, offline=offline)
    for _, candidate in starts:
        _check(candidate, cluster)
    if forget:
        for _, candidate in starts[:1]:
            history.forget(Case(candidate.job, candidate.plan, cluster))
    run = Trials(cluster, out, steps=steps, timeout_seconds=timeout_seconds)
    tuned = decisions.tune(
        starts,
        run.run,
        is_possible=lambda candidate: is_possible(candidate, cluster),
        on_trial=lambda why, candidate: progress(f"{why}: {describe(candidate)}"),
        most_trials=trials,
    )
    predicted = compare(tuned.trials, cluster, progress)
    return replace(tuned, trials=predicted, model=model, gpu=str(cluster))


def _check(candidate: Candidate, cluster: Cluster) -> None:
    """Raise UsageError for a plan that trials cannot run, or that `tonnage train` would refuse."""
    job, plan = candidate.job, candidate.plan
    if plan.engine != "tonnage":
        raise UsageError(
            f"tune measures plans of the engine tonnage, and this one is for {plan.engine}; export it, and tune the "
            "script: tonnage tune --out DIR -- COMMAND."
        )
    checks.check_supported(job, plan)
    checks.check_techniques(job, plan, cluster)


def _find_starts(
    model_or_plan: str,
    gpu: str | None,
    gpus: int | None,
    options: Mapping[str, Any],
    progress: Callable[[str], None],
    *,
    offline: bool,
) -> tuple[Starts, Cluster, str]:
    """Return the candidates to begin with, the devices, and the model as in a plan file."""
    path = Path(model_or_plan)
    if path.suffix == ".toml":
        saved = plan_file.read(path)
        cluster = check_hardware(gpu or saved.gpu, gpus)
        return from_file(saved, options, offline=offline), cluster, saved.model
    cluster = check_hardware(gpu, gpus)
    starts = from_model(model_or_plan, cluster, options, progress, offline=offline)
    return starts, cluster, plan_file.found_anywhere(model_or_plan)


def compare(trials: Sequence[Trial], cluster: Cluster, progress: Callable[[str], None]) -> tuple[Trial, ...]:
    """Return the trials with the time model's seconds, and remember what was measured.

    The CPU has no time model.  Without a ghost, which runs what is timed, nothing is predicted.
    """
    if cluster.device.id == CPU:
        return tuple(trials)
    compared = []
    for trial in trials:
        if trial.candidate is None:
            compared.append(trial)
            continue
        progress("comparing with predictions")
        case = Case(trial.candidate.job, trial.candidate.plan, cluster)
        try:
            found = predict(case).estimate
        except TonnageError as error:
            compared.append(replace(trial, unpredicted=str(error)))
            continue
        seconds = found.time.get("uncorrected_step_seconds") or found.time.get("step_seconds")
        compared.append(replace(trial, predicted_seconds=seconds))
        if seconds and trial.outcome.step_seconds:
            torch_version = str(found.versions.get("torch", ""))
            history.record(
                case, torch_version, predicted_seconds=seconds, measured_seconds=trial.outcome.step_seconds
            )
    return tuple(compared)


def check_hardware(gpu: str | None, gpus: int | None) -> Cluster:
    """Return the devices of that name, by default this machine's GPUs.  Raises UsageError if they are not here."""
    if gpu is not None and (cluster := parse_cluster(gpu, gpus=gpus)).device.id == CPU:
        return cluster
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            f"tune measures on the GPUs of this machine, and it has none; tonnage plan predicts for "
            f"{gpu or 'any GPU'}, and --gpu cpu measures on the CPU."
        )
    here = parse_cluster(HERE, gpus=gpus)
    if gpu is not None and (cluster.device.id != here.device.id or cluster.gpus > here.gpus):
        raise UsageError(f"tune measures on the GPUs of this machine, {here}, and {cluster} was asked for.")
    return here if gpu is None else cluster
