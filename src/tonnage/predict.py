"""`tonnage.estimate`: a Job under a Plan, run on ghost GPUs, summed up."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from tonnage.device import CPU, Cluster
from tonnage.errors import UsageError
from tonnage.job import Job
from tonnage.plan import Plan
from tonnage.summary import Run, summarise
from tonnage.trace import Trace

Progress = Callable[[str], None]


def estimate(
    job: Job,
    plan: Plan,
    cluster: Cluster,
    *,
    rank: int = 0,
    steps: int = 3,
    torch_version: str | None = None,
    worker: Any = None,
    progress: Progress = lambda text: None,
) -> Run:
    """Run `steps` optimizer steps of one rank on a ghost of the cluster's card, in a process of its own.

    For the device `cpu` nothing is run on a ghost: the step is recorded here, without computing (see `record`).
    `worker` is a warm `tonnage.ghost.pool.Worker` to use instead of a new one.  Raises UsageError when a technique
    refuses the job, CannotEstimate when the model cannot be built, GhostUnavailable when no ghost can run here.
    """
    job = job.on_ranks(cluster.gpus)
    check(job, plan, cluster)
    if not 0 <= rank < cluster.gpus:
        raise UsageError(f"Rank {rank} does not exist: the cluster has ranks 0 to {cluster.gpus - 1}.")
    trace = _trace(job, plan, cluster, rank, steps, torch_version, worker, progress)
    return _summed_up(trace, job, plan, cluster, steps)


def check(job: Job, plan: Plan, cluster: Cluster) -> None:
    """Raise UsageError with the first reason why the plan's engine cannot run this job."""
    from tonnage.engines import engine_of

    for refusal in engine_of(plan).refusals(job, plan, cluster):
        raise UsageError(f"{refusal}")


def _trace(
    job: Job,
    plan: Plan,
    cluster: Cluster,
    rank: int,
    steps: int,
    torch_version: str | None,
    worker: Any,
    progress: Progress,
) -> Trace:
    if cluster.device.id == CPU:
        from tonnage import record

        progress(f"recording {steps} steps on the CPU without computing them")
        return record.run(job, plan, cluster, rank=rank, steps=steps)
    if worker is not None:
        found: Trace = worker.run(job, plan, cluster, rank=rank, steps=steps)
        return found
    from tonnage.ghost.pool import Worker

    with Worker(torch_version, progress) as fresh:
        progress(f"running {steps} steps on a ghost {cluster.device.id}")
        return fresh.run(job, plan, cluster, rank=rank, steps=steps)


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
