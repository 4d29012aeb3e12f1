"""`tonnage.estimate`: a Job under a Plan, run on ghost GPUs, summed up."""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, Final

from tonnage.axes import axes
from tonnage.device import CPU, Cluster
from tonnage.errors import GhostUnavailable, UsageError
from tonnage.job import Job
from tonnage.plan import Plan
from tonnage.summary import Run, summarise
from tonnage.trace import Trace

Progress = Callable[[str], None]

SOURCES: Final = ("ghost", "meta")
"""Where an estimate's Trace may come from; `real` ones are recorded, not estimated."""


def estimate(
    job: Job,
    plan: Plan,
    cluster: Cluster,
    *,
    rank: int = 0,
    steps: int = 3,
    torch_version: str | None = None,
    worker: Any = None,
    source: str = "ghost",
    fresh: bool = False,
    progress: Progress = lambda text: None,
) -> Run:
    """Run `steps` optimizer steps of one rank on a ghost of the cluster's card, in a process of its own.

    For the device `cpu` nothing is run on a ghost: the step is recorded here, without computing (see `record`).
    With the source `meta` this is so for every card, whose choices are imitated (see `portable`).  `worker` is a warm
    `tonnage.ghost.pool.Worker` to use instead of a new one.  Where the same was run before, its Trace is taken from
    the shelf (`tonnage.shelf`) and nothing is run, unless `fresh`.

    Raises UsageError when a technique refuses the job, CannotEstimate when the model cannot be built,
    GhostUnavailable when no ghost can run here.
    """
    if source not in SOURCES:
        raise UsageError(f"Unknown source {source!r}; possible: {', '.join(SOURCES)}.")
    job = job.on_ranks(axes(plan, cluster.gpus, cluster.gpus_per_node).data_parallel)
    check(job, plan, cluster)
    if not 0 <= rank < cluster.gpus:
        raise UsageError(f"Rank {rank} does not exist: the cluster has ranks 0 to {cluster.gpus - 1}.")
    if cluster.device.id == CPU:
        from tonnage import record

        progress(f"recording {steps} steps on the CPU without computing them")
        trace = record.run(job, plan, cluster, rank=rank, steps=steps)
        return _summed_up(trace, job, plan, cluster, steps)

    from tonnage import shelf
    from tonnage.ghost.pool import request

    version = worker.torch_version if worker is not None else torch_version
    if source == "meta":
        _check_portable(job, plan, cluster, version)
    asked = {**request(job, plan, cluster, rank=rank, steps=steps), "source": source}
    key = shelf.key(asked, version)
    kept = shelf.find(key) if key is not None and not fresh else None
    if kept is not None:
        return _from_the_shelf(_summed_up(kept, job, plan, cluster, steps))
    if source == "meta":
        trace = _imitated(job, plan, cluster, rank, steps, progress)
    else:
        trace = _run(job, plan, cluster, rank, steps, version, worker, progress)
    if key is not None and key == shelf.key(asked, version):  # nothing was installed meanwhile
        shelf.keep(key, trace)
    return _summed_up(trace, job, plan, cluster, steps)


def _from_the_shelf(run: Run) -> Run:
    coverage = run.estimate.coverage
    said = (*coverage.run, "not now: the trace was kept from an earlier run of the same (--fresh runs it again)")
    return replace(run, estimate=replace(run.estimate, coverage=replace(coverage, run=said)))


def check(job: Job, plan: Plan, cluster: Cluster) -> None:
    """Raise UsageError with the first reason why the plan's engine cannot run this job."""
    from tonnage.engines import engine_of

    for refusal in engine_of(plan).refusals(job, plan, cluster):
        raise UsageError(f"{refusal}")


def _check_portable(job: Job, plan: Plan, cluster: Cluster, torch_version: str | None) -> None:
    from tonnage.portable import scope

    if torch_version is not None:
        raise UsageError("The source meta runs the installed torch only; leave the version out, or choose ghost.")
    for refusal in scope.refusals(job, plan, cluster):
        raise UsageError(f"{refusal}")


def _imitated(job: Job, plan: Plan, cluster: Cluster, rank: int, steps: int, progress: Progress) -> Trace:
    from tonnage.portable import step

    progress(f"imitating {steps} steps on a {cluster.device.id}")
    return step.run(job, plan, cluster, rank=rank, steps=steps)


def _run(
    job: Job,
    plan: Plan,
    cluster: Cluster,
    rank: int,
    steps: int,
    torch_version: str | None,
    worker: Any,
    progress: Progress,
) -> Trace:
    if worker is not None:
        found: Trace = worker.run(job, plan, cluster, rank=rank, steps=steps)
        return found
    from tonnage.ghost.pool import Worker

    try:
        with Worker(torch_version, progress) as own:
            progress(f"running {steps} steps on a ghost {cluster.device.id}")
            return own.run(job, plan, cluster, rank=rank, steps=steps)
    except GhostUnavailable as error:
        raise GhostUnavailable(f"{error} Or choose --source meta, which needs no ghost.") from error


def _summed_up(trace: Trace, job: Job, plan: Plan, cluster: Cluster, steps: int) -> Run:
    described = {**asdict(job), "steps": steps}
    model = described.pop("model")
    return summarise(
        [trace],
        cluster,
        model={
            "name": model["name"],
            "source": model["source"],
            "vocab_size": model["config"].get("vocab_size"),
        },
        job=described,
        plan=asdict(plan),
    )
