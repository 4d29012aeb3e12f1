"""Predicts an Estimate for a Case: the steps of one rank, or of each rank that differs, are run, summed up and
priced.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any, Final

from tonnage.case import Case
from tonnage.cluster import CPU
from tonnage.errors import UsageError
from tonnage.estimates import history
from tonnage.estimates.assumptions import list_assumptions
from tonnage.estimates.ddp_buckets import with_buckets
from tonnage.estimates.from_traces import Run, estimate_from_traces
from tonnage.estimates.host_memory import loaded_bytes
from tonnage.estimates.sources import Options, open_source
from tonnage.estimates.step_time import with_time
from tonnage.shallow.depths import is_repetitive
from tonnage.timing.scores import avoidable_score_bytes, find_sparing_attention
from tonnage.trace.gc_paused import gc_paused
from tonnage.trace.trace import Trace
from tonnage.trainers.cases import check

STEPS: Final = 3
"""The first step creates optimizer states, the second holds them beside activations, the third is like all others."""

Progress = Callable[[str], None]


def answer(
    case: Case, *, rank: int | None = None, steps: int | None = None, source: str = "ghost", **options: Any
) -> Run:
    """Return the Run that `tonnage estimate` shows.

    Without a number of `steps`, three are estimated; if all are alike the last two repeat the first one's requests.
    `options` are those of `tonnage.estimates.sources.Options`.  Raises as `estimate` does.
    """
    run_steps, repeated = (steps, 0) if steps is not None else usual_steps(case, source)
    return estimate(case, rank=rank, steps=run_steps, source=source, repeated=repeated, counting=True, **options)


def estimate(
    case: Case, *, rank: int | None = None, steps: int = STEPS, source: str = "ghost", **options: Any
) -> Run:
    """Run `steps` optimizer steps of a case and sum them up.

    Without a `rank`, all ranks that differ are run (of a pipeline the first stage, the one after it and the last),
    the worst is reported and the others are listed.  `source` is one of `tonnage.estimates.sources.SOURCES`,
    `options` are the fields of its Options.

    Raises UsageError if a technique refuses the job, CannotEstimate if the model cannot be built, GhostUnavailable if
    no ghost can run here.
    """
    source_options = Options(**options)
    with ExitStack() as stack:
        opened = open_source(source, case, source_options, stack)
        case = case.with_accumulation()
        check(case)
        if steps < 1:
            raise UsageError(f"{steps} steps cannot be run; at least 1.")
        if rank is not None and rank not in range(case.cluster.gpus):
            raise UsageError(f"Rank {rank!r} does not exist: the cluster has ranks 0 to {case.cluster.gpus - 1}.")
        ranks = case.mesh.different if rank is None else (rank,)
        traces = [opened.trace(case, each_rank, steps) for each_rank in ranks]
    with gc_paused():  # a summary creates many small objects that all stay
        run = _complete(traces, case, steps + source_options.repeated)
    return _mark_as_cached(run) if opened.reused == len(ranks) else run


def trace(case: Case, *, rank: int, steps: int, worker: Any) -> Trace:
    """Return the Trace of one rank's steps on a warm worker, sketched: only for comparisons, never shown.

    Raises UsageError and CannotEstimate as `estimate` does.
    """
    case = case.with_accumulation()
    check(case)
    with ExitStack() as stack:
        source = open_source("ghost", case, Options(worker=worker, sketched=True), stack)
        return source.trace(case, rank, steps)


def usual_steps(case: Case, source: str = "ghost") -> tuple[int, int]:
    """Return how many steps run by default, and how many more repeat the first one's requests.

    If all steps make the same requests (`tonnage.shallow.depths.is_repetitive`), one and two; else three and none.
    """
    repetitive = source == "ghost" and case.cluster.device.id != CPU and is_repetitive(case.job, case.plan)
    return (1, STEPS - 1) if repetitive else (STEPS, 0)


def _mark_as_cached(run: Run) -> Run:
    coverage = run.estimate.coverage
    parts = (*coverage.run, "not now: the trace was cached by an earlier run of the same (--fresh runs it again)")
    return replace(run, estimate=replace(run.estimate, coverage=replace(coverage, run=parts)))


def _complete(traces: list[Trace], case: Case, steps: int) -> Run:
    job = {**asdict(case.job), "steps": steps}
    model = job.pop("model")
    run = estimate_from_traces(
        traces,
        case.cluster,
        model={
            "name": model["name"],
            "source": model["source"],
            "vocab_size": model["config"].get("vocab_size"),
            "scores_bytes": avoidable_score_bytes(case),
            "sparing_attention": find_sparing_attention(case),
            "words": model["config"].get("vocab_size") is not None or "text_config" in model["config"],
        },
        job=job,
        plan=asdict(case.plan),
        loading_bytes=loaded_bytes(case, max((trace.model.get("parameters") or 0 for trace in traces), default=0)),
    )
    summary = run.estimate
    assumed = (*summary.coverage.assumed, *list_assumptions(case))
    run = replace(run, estimate=replace(summary, coverage=replace(summary.coverage, assumed=assumed)))
    run = with_time(run, case, [trace.worked for trace in traces if trace.worked is not None])
    return replace(run, estimate=history.correct(with_buckets(run.estimate, case.plan, case.cluster), case))
