"""Answer a question: search the plans, explain the best one, and return a Solution (`tonnage.plan`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from tonnage.catalog.devices import spell_cluster
from tonnage.cluster import CPU
from tonnage.errors import CannotEstimate, GhostUnavailable, UnreadableModel, UsageError
from tonnage.estimates.assumptions import describe_dropped_fields, describe_quantized_checkpoint
from tonnage.estimates.step_time import as_time
from tonnage.planner.alternatives import is_alike
from tonnage.planner.budget_fit import add_budgets
from tonnage.planner.candidates import check_precision, list_candidates
from tonnage.planner.contradictions import find_ways_out
from tonnage.planner.decision_path import trace_path
from tonnage.planner.describe import describe
from tonnage.planner.fit import Fitting
from tonnage.planner.nearest import explain_impossible, find_nearest, list_smallest
from tonnage.planner.pareto import find_frontier
from tonnage.planner.pricing import price_all
from tonnage.planner.prune import take_back, take_back_free
from tonnage.planner.question import Question
from tonnage.planner.reasons import explain_choice
from tonnage.planner.search import Search
from tonnage.planner.solution import Choice, Point, Refused, Solution, Stage
from tonnage.planner.suggestions import suggest_options
from tonnage.planner.tight import find_barely_fitting, prefer_room
from tonnage.planner.trial_runner import TrialRunner
from tonnage.planner.unpriced import explain_unpriced
from tonnage.trace.gc_paused import gc_paused
from tonnage.trainers import engine_of
from tonnage.units import format_gib, pluralise

Progress = Callable[[str], None]

EXPLAINING: Final = "taking each technique back, to see what it is for"
"""The progress message when the plans are found."""


def solve(
    question: Question,
    *,
    top: int = 4,
    pareto: bool = False,
    explain: bool = True,
    torch_version: str | None = None,
    progress: Progress = lambda text: None,
) -> Solution:
    """Return the fastest plan that fits, and `top` - 1 alternatives, each run on the ghost.

    `explain` adds reasons and the decision path of the best plan, and remedies if nothing fits; `pareto` adds the
    Pareto frontier of memory and speed.  Raises UsageError for a contradictory question, UnreadableModel and
    GhostUnavailable if nothing can be run.
    """
    check_precision(question)
    if question.cluster.device.id == CPU:
        raise UsageError(
            "A plan is for GPUs, and cpu is none: name a card with --gpu; estimate --gpu cpu records a step."
        )
    with TrialRunner(progress, torch=torch_version) as runner:
        return search(question, runner, top=top, pareto=pareto, explain=explain, progress=progress)


def search(
    question: Question,
    runner: TrialRunner,
    *,
    top: int = 4,
    pareto: bool = False,
    explain: bool = True,
    progress: Progress = lambda text: None,
) -> Solution:
    """Return the Solution of `solve`, with workers that exist already."""
    with gc_paused():  # garbage collection would scan all candidates repeatedly: a quarter of the work
        return _search(question, runner, top=top, pareto=pareto, explain=explain, progress=progress)


def _search(
    question: Question, runner: TrialRunner, *, top: int, pareto: bool, explain: bool, progress: Progress
) -> Solution:
    document = _describe_question(question)
    for note in (*describe_quantized_checkpoint(question.job), *describe_dropped_fields(question.job)):
        progress(f"note: {note}")
    if (refused := refuse_missing_engine(question)) is not None:
        return refused
    plans = Search(question, runner, progress)
    try:
        plans.run(top)
        question = plans.narrowed
        if not plans.found and not plans.refusals.only_failures:
            plans.try_smallest(list_smallest(question))
        add_budgets(plans, top)
        has_moved = prefer_room(plans)
        barely = find_barely_fitting(plans)
    except (GhostUnavailable, UnreadableModel):
        raise
    except CannotEstimate as error:
        return Solution(status="unknown", question=document, refused=(Refused(what="time", why=str(error)),))
    if not plans.found and barely is None:
        return _explain_none(plans, question, document, explain)
    choices = _name_choices(plans.found)
    tight = None if barely is None else _name_choices([barely])[0]
    if tight is not None and not choices:
        choices, tight, question = [tight], None, replace(question, headroom=0.0)
    counts = {**plans.counts, "run": runner.run_count}
    stages: tuple[Stage, ...] = ()
    if explain:
        progress(EXPLAINING)
        choices = [take_back(choices[0], question, runner), *take_back_free(choices[1:], question, runner)]
    choices, tight = _show(choices, tight, document["headroom"], question, runner, has_moved=has_moved)
    if explain:
        choices[0] = replace(choices[0], reasons=explain_choice(choices[0], question, runner))
        stages = trace_path(choices[0], question, runner)
    points: tuple[Point, ...] = ()
    if pareto:
        progress("running the frontier of memory and speed")
        order = price_all(list_candidates(question), question.cluster)
        points = find_frontier(order, choices, question, runner)
    return Solution(
        status="found",
        question=document,
        unpriced=explain_unpriced(choices[0].candidate, question.cluster),
        plans=tuple(choices),
        barely=tight,
        path=stages,
        refused=_summarize_refusals(plans),
        frontier=points,
        offers=suggest_options(choices[0], question, runner) if explain else (),
        looked_at={**counts, "run": runner.run_count},
    )


def _name_choices(plans: Sequence[Fitting]) -> list[Choice]:
    """Return the plans found with their names, without reasons yet."""
    return [
        Choice(
            name="best" if not place else describe(priced.candidate),
            candidate=priced.candidate,
            estimate=estimate if priced.timing is None else replace(estimate, time=as_time(priced.timing)),
        )
        for place, (priced, estimate) in enumerate(plans)
    ]


def _explain_none(plans: Search, question: Question, document: dict[str, Any], explain: bool) -> Solution:
    """Return the Solution of a search that found no plan: the nearest one, or why there is none."""
    runner, counts = plans.runner, {**plans.counts, "run": plans.runner.run_count}
    refused = _summarize_refusals(plans)
    if not counts["priced"] and not counts["below_bound"]:
        why = _explain_undivided(question)
        return Solution(status="unsupported", question=document, refused=(Refused(what="all", why=why),))
    if not plans.refusals.too_large and not counts["below_bound"]:
        return Solution(status="unsupported", question=document, refused=refused, looked_at=counts)
    plans.progress("nothing fits; looking for what would")
    nearest = find_nearest(question, runner, remedies=explain)
    counts["run"] = runner.run_count
    if nearest is None and not plans.refusals.too_large:  # nothing was run, so nothing is known to be too large
        if (why_impossible := explain_impossible(question)) is not None:
            refused = (Refused(what="all", why=why_impossible), *refused)
        return Solution(status="unsupported", question=document, refused=refused, looked_at=counts)
    return Solution(status="too_large", question=document, refused=refused, nearest=nearest, looked_at=counts)


def _show(
    choices: Sequence[Choice],
    barely: Choice | None,
    headroom: float,
    question: Question,
    runner: TrialRunner,
    *,
    has_moved: bool,
) -> tuple[list[Choice], Choice | None]:
    """Return the plans with the estimates that `tonnage estimate` gives of them, and with their names and notes.

    The order is that of their seconds, if one of them was priced only now; `has_moved`: the first is one with room.
    """
    every = [*choices, *([] if barely is None else [barely])]
    runs = runner.run_shown([choice.candidate for choice in every], question.cluster)
    every = [
        choice if run is None else replace(choice, estimate=run) for choice, run in zip(every, runs, strict=True)
    ]
    choices, barely = every[: len(choices)], every[len(choices)] if barely is not None else None
    if not has_moved and all(choice.estimate.time["step_seconds"] for choice in choices):
        choices = sorted(choices, key=lambda choice: choice.estimate.time["step_seconds"])
    best, *others = _drop_alike(choices, kept=2 if has_moved else 1)
    others = [replace(choice, name=describe(choice.candidate)) for choice in others]
    if has_moved:
        others[0] = replace(others[0], note=_describe_tight(others[0], best))
    if best.estimate.peak.process_bytes > best.estimate.cluster["capacity_bytes"] * (1 - headroom):
        best = replace(best, note=_describe_barely(best, None, headroom))
    if barely is not None:
        note = _describe_barely(barely, best, headroom)
        barely = replace(barely, name=describe(barely.candidate), note=note)
    return [replace(best, name="best"), *others], barely


def _drop_alike(choices: Sequence[Choice], *, kept: int) -> list[Choice]:
    """Return the first plans, and the others that differ: without superfluous techniques some may be alike.

    One that is alike and needs less memory stays: it may be there for its room.
    """
    new = [choice for place, choice in enumerate(choices) if place >= kept and not _is_alike(choice, choices[:place])]
    return [*choices[:kept], *new]


def _is_alike(choice: Choice, others: Sequence[Choice]) -> bool:
    alike = [other for other in others if is_alike(choice.candidate, other.candidate)]
    return any(other.estimate.peak.process_bytes <= choice.estimate.peak.process_bytes for other in alike)


def _describe_tight(faster: Choice, best: Choice) -> str:
    """Return why a faster plan comes second."""
    seconds, others = (choice.estimate.time["step_seconds"] for choice in (faster, best))
    free = format_gib(faster.estimate.cluster["capacity_bytes"] - faster.estimate.peak.process_bytes)
    gain = f"{1 - seconds / others:.1%} faster" if seconds and others else "not slower"
    return f"{gain} than the first, and leaves only {free} free"


def _describe_barely(choice: Choice, best: Choice | None, headroom: float) -> str:
    """Return that a plan fits only inside the headroom, and how much slower the best plan outside it is."""
    peak, capacity = choice.estimate.peak.process_bytes, choice.estimate.cluster["capacity_bytes"]
    free = format_gib(capacity - peak)
    note = f"fits barely: {free} free is less than the headroom, {100 * headroom:g} % of the card"
    note += f"; --headroom {int((1 - peak / capacity) * 1000) / 10:g} plans with it"
    seconds = choice.estimate.time["step_seconds"]
    if best is not None and seconds and (others := best.estimate.time["step_seconds"]):
        note += f"; the headroom costs {others - seconds:.3g} s a step, {others / seconds:.2f} times as long"
    return note


def _explain_undivided(question: Question) -> str:
    """Return why there is no combination at all, with the nearest batches that all GPUs could share."""
    sequences, gpus, tokens = question.sequences, question.cluster.gpus, question.job.seq_len
    why = (
        f"the constraints leave no combination that divides {pluralise(sequences, 'sequence')} a step, the heads and "
    )
    why += f"the layers among {pluralise(gpus, 'GPU')}"
    why += f", with {question.plan.pp} micro-batches for as many stages" if question.plan.pp > 1 else ""
    if ways := find_ways_out(question):
        why += f"; with {' or '.join(ways)} left out there are some"
    if question.job.global_batch_tokens is None or sequences % gpus == 0:
        return why
    below = sequences // gpus * gpus
    nearest_batches = " or ".join(f"{batch * tokens:,}" for batch in (below, below + gpus) if batch)
    return f"{why}; all of them could share a global batch of {nearest_batches} tokens"


def refuse_missing_engine(question: Question) -> Solution | None:
    """Return a Solution that says which trainer is not installed; None if it is."""
    missing = next(engine_of(question.plan).missing(), None)
    if missing is None:
        return None
    refused = (Refused(what="all", why=f"{missing}"),)
    return Solution(status="unsupported", question=_describe_question(question), refused=refused)


def _summarize_refusals(plans: Search) -> tuple[Refused, ...]:
    return plans.refusals.summarize(something_ran=bool(plans.found or plans.refusals.too_large))


def _describe_question(question: Question) -> dict[str, Any]:
    """Return the question as in `plan --json`."""
    job = asdict(question.job)
    model = job.pop("model")
    cluster = question.cluster
    gpu, gpu_memory_bytes = spell_cluster(cluster)
    return {
        "model": model["name"],
        "job": job,
        "plan": asdict(question.plan),
        "cluster": str(cluster),
        "gpu": gpu,
        "gpu_memory_bytes": gpu_memory_bytes,
        "gpus": cluster.gpus,
        "capacity_bytes": cluster.device.capacity_bytes,
        "budget_bytes": question.budget_bytes,
        "headroom": question.headroom,
        "host_memory_bytes": cluster.host_memory_bytes,
        "host_limit_bytes": cluster.host_limit_bytes,
        "sequences": question.sequences,
        "words": model["config"].get("vocab_size") is not None or "text_config" in model["config"],
        "methods": list(question.methods or (question.job.method,)),
        "only": list(question.only),
        "without": list(question.without),
        "allow": list(question.allow),
    }
