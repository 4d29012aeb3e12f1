"""`tonnage.plan`: a question in, a Solution out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final

from tonnage.catalog.devices import spell_cluster
from tonnage.cluster import CPU
from tonnage.errors import CannotEstimate, GhostUnavailable, UnreadableModel, UsageError
from tonnage.estimates.assumptions import describe_quantized_checkpoint
from tonnage.planner.solution import Choice, Point, Refused, Solution, Stage
from tonnage.search.best import Search
from tonnage.search.contradictions import ways_out
from tonnage.search.counted import with_seconds
from tonnage.search.filling import fill
from tonnage.search.memory import Ghosts
from tonnage.search.nearest import nearest, refusal, smallest
from tonnage.search.offers import offers
from tonnage.search.pricing import fastest_first
from tonnage.search.reasons import looks, path, reasons
from tonnage.search.space import Question, candidates, check_precision
from tonnage.search.trade import frontier
from tonnage.search.undone import without_unwanted, without_useless
from tonnage.search.unpriced import unknown_because
from tonnage.trace.gc_paused import uncollected
from tonnage.trainers import engine_of
from tonnage.units import counted

Progress = Callable[[str], None]

EXPLAINING: Final = "taking each technique back, to see what it is for"
"""What is said when the plans stand."""


def solve(
    question: Question,
    *,
    top: int = 4,
    pareto: bool = False,
    explain: bool = True,
    torch_version: str | None = None,
    progress: Progress = lambda text: None,
) -> Solution:
    """The fastest plan that fits, and `top` - 1 of other kinds, each run on the ghost.

    `explain` adds reasons and the decision path to the best, and remedies where nothing fits; `pareto` the frontier
    of memory and speed.  Raises UsageError for a contradictory question, UnreadableModel and GhostUnavailable where
    nothing can be run.
    """
    check_precision(question)
    if question.cluster.device.id == CPU:
        raise UsageError(
            "A plan is for GPUs, and cpu is none: name a card with --gpu; estimate --gpu cpu records a step."
        )
    with Ghosts(progress, torch=torch_version) as ghosts:
        return search(question, ghosts, top=top, pareto=pareto, explain=explain, progress=progress)


def search(
    question: Question,
    ghosts: Ghosts,
    *,
    top: int = 4,
    pareto: bool = False,
    explain: bool = True,
    progress: Progress = lambda text: None,
) -> Solution:
    """`solve` with ghosts that are there already."""
    with uncollected():  # else all candidates are gone through again and again: a quarter of the work
        return _search(question, ghosts, top=top, pareto=pareto, explain=explain, progress=progress)


def _search(
    question: Question, ghosts: Ghosts, *, top: int, pareto: bool, explain: bool, progress: Progress
) -> Solution:
    asked = _asked(question)
    for said in describe_quantized_checkpoint(question.job):
        progress(f"note: {said}")
    if (without := without_engine(question)) is not None:
        return without
    found = Search(question, ghosts, progress, partial(looks, question=question) if explain else lambda best: ())
    try:
        found.run(top)
        question = found.narrowed
        if not found.found:
            found.try_smallest(smallest(question))
        fill(found, top)
        found.with_all_logits()
    except (GhostUnavailable, UnreadableModel):
        raise
    except CannotEstimate as error:
        return Solution(status="unknown", question=asked, refused=(Refused(what="time", why=str(error)),))
    counts = {**found.counts, "run": ghosts.runs}
    refused = _refused(found)
    if not found.counts["priced"] and not found.counts["below_bound"]:
        why = _undivided(question)
        return Solution(status="unsupported", question=asked, refused=(Refused(what="all", why=why),))
    if not found.found:
        if not found.too_large and not found.counts["below_bound"]:
            return Solution(status="unsupported", question=asked, refused=refused, looked_at=counts)
        progress("nothing fits; looking for what would")
        near = nearest(question, ghosts, remedies=explain)
        counts["run"] = ghosts.runs
        if near is None and not found.too_large:  # nothing was run, so nothing is known to be too large
            if (against := refusal(question)) is not None:
                refused = (Refused(what="all", why=against), *refused)
            return Solution(status="unsupported", question=asked, refused=refused, looked_at=counts)
        return Solution(status="too_large", question=asked, refused=refused, nearest=near, looked_at=counts)
    choices = with_seconds(found.choices(), ghosts, question, progress)
    stages: tuple[Stage, ...] = ()
    if explain:
        progress(EXPLAINING)
        ghosts.ahead(looks(choices[0].candidate, question), question.cluster)
        choices[0] = _explained(without_useless(choices[0], question, ghosts), question, ghosts)
        stages = path(choices[0], question, ghosts)
    points: tuple[Point, ...] = ()
    if pareto:
        progress("running the frontier of memory and speed")
        points = frontier(fastest_first(candidates(question), question.cluster), choices, question, ghosts)
    return Solution(
        status="found",
        question=asked,
        unpriced=unknown_because(choices[0].candidate, question.cluster),
        plans=tuple(choices),
        path=stages,
        refused=refused,
        frontier=points,
        offers=offers(choices[0], question) if explain else (),
        looked_at={**counts, "run": ghosts.runs},
    )


def _explained(best: Choice, question: Question, ghosts: Ghosts) -> Choice:
    """The best plan with its reasons; without what, by these, only costs memory."""
    said = replace(best, reasons=reasons(best, question, ghosts))
    less = without_unwanted(said, question, ghosts)
    return said if less is said else replace(less, reasons=reasons(less, question, ghosts))


def _undivided(question: Question) -> str:
    """Why there is no combination at all, with the nearest batches that all GPUs could share."""
    sequences, gpus, tokens = question.sequences, question.cluster.gpus, question.job.seq_len
    why = f"the constraints leave no combination that divides {counted(sequences, 'sequence')} a step, the heads and "
    why += f"the layers among {counted(gpus, 'GPU')}"
    why += f", with {question.plan.pp} micro-batches for as many stages" if question.plan.pp > 1 else ""
    if ways := ways_out(question):
        why += f"; with {' or '.join(ways)} left out there are some"
    if question.job.global_batch_tokens is None or sequences % gpus == 0:
        return why
    below = sequences // gpus * gpus
    nearest_batches = " or ".join(f"{batch * tokens:,}" for batch in (below, below + gpus) if batch)
    return f"{why}; all of them could share a global batch of {nearest_batches} tokens"


def without_engine(question: Question) -> Solution | None:
    """The answer where the trainer that was asked for is not installed; None where it is."""
    lacking = next(engine_of(question.plan).missing(), None)
    if lacking is None:
        return None
    return Solution(status="unsupported", question=_asked(question), refused=(Refused(what="all", why=f"{lacking}"),))


def _refused(found: Search) -> tuple[Refused, ...]:
    """What was refused; where whatever was run failed in the same words, these are said once, of all."""
    refused, words = tuple(found.refused.values()), {why for _, why in found.failures}
    if found.found or found.too_large or len(words) != 1:
        return refused
    why = words.pop()
    return (Refused(what="all", why=why), *(one for one in refused if one.why != why))


def _asked(question: Question) -> dict[str, Any]:
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
        "host_memory_bytes": question.host_memory_bytes,
        "sequences": question.sequences,
        "words": model["config"].get("vocab_size") is not None or "text_config" in model["config"],
        "methods": list(question.methods or (question.job.method,)),
        "only": list(question.only),
        "without": list(question.without),
        "allow": list(question.allow),
    }
