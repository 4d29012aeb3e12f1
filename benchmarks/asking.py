"""What the pages that teach ask of the ghost: one warm worker, cards on which everything fits, most bytes by kind."""

from dataclasses import replace
from typing import Any

from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.cluster import Cluster
from tonnage.errors import TonnageError
from tonnage.estimates.from_traces import Run
from tonnage.estimates.predict import estimate
from tonnage.estimates.timeline import timeline
from tonnage.job import Job
from tonnage.plans import Plan
from tonnage.trainers.cases import request
from tonnage.workers.worker import Worker

ENOUGH_BYTES = 2**43
"""8 TiB: a card on which everything fits."""

STATES = ("parameter", "gradient", "optimizer_state")


def run(worker: Worker, model: str, *, gpu: str = "a100-80gb", changes: Any = None, **options: Any) -> Run:
    """Three steps on a card that never runs out; `changes` replace fields of the model's configuration."""
    job, plan = request(model, offline=True, **options)
    if changes:
        job = replace(job, model=replace(job.model, config={**job.model.config, **changes}))
    return answer(worker, job, plan, gpu)


def answer(worker: Worker, job: Job, plan: Plan, gpu: str) -> Run:
    cluster = parse_cluster(gpu)
    roomy = Cluster(
        device=cluster.device.with_capacity(ENOUGH_BYTES),
        gpus_per_node=cluster.gpus_per_node,
        nodes=cluster.nodes,
    )
    return estimate(Case(job, plan, roomy), worker=worker)


def most(found: Run, *categories: str) -> int:
    """The most bytes that blocks of these categories held together at one moment."""
    changes = []
    for life in timeline(found.traces[0]).lives:
        if life.category in categories:
            changes += [(life.born, life.size_bytes), (life.died, -life.size_bytes)]
    held = highest = 0
    for _, change in sorted(changes):
        held += change
        highest = max(highest, held)
    return highest


def table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Markdown; all columns but the first are aligned to the right."""
    aligned = ("---", *("---:",) * (len(headings) - 1))
    return "".join(f"| {' | '.join(line)} |\n" for line in (headings, aligned, *rows))


def one_line(error: TonnageError) -> str:
    return " ".join(str(error).split())
