"""How long an estimate takes on a warm worker: every model of the catalog, FSDP2 on up to 1024 ranks, and again.

    python benchmarks/speed.py [MODEL ...] [--again 2]

Three steps, as `tonnage estimate` runs them, of full fine-tuning in pure bf16 with AdamW, one sequence of 4096 tokens
(or as many as the model has positions), on one imaginary card of 16 TiB; full checkpointing above 60 billion
parameters.  Each estimate runs once so that the worker has imported the model's code, then `--again` times, of which
the fastest counts.  "own" is the processor time of tonnage's processes together, which hardly depends on what else
the machine does; "wall" is what a user waits; "again" is the same question once more, answered from the shelf of
traces, without a ghost.  Slowest first, then small jobs one after the other, and what a user waits for
`tonnage --help`.
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, replace

import psutil

from tonnage.case import Case as TrainingCase
from tonnage.catalog.configurations import resolve
from tonnage.catalog.devices import parse_cluster
from tonnage.catalog.models import find_model, model_names
from tonnage.cluster import Cluster
from tonnage.errors import TonnageError
from tonnage.estimates.predict import estimate, usual_steps
from tonnage.job import Job
from tonnage.plans import Plan
from tonnage.workers.worker import Worker

GIB = 2**30
CARD_BYTES = 2**44
LARGE_PARAMETERS = 60e9
RANKS = (
    ("llama-3.1-8b", "8xh100-80gb"),
    ("llama-3.1-8b", "8x8xh100-80gb"),
    ("llama-3.1-8b", "128x8xh100-80gb"),
    ("llama-3.1-70b", "128x8xh100-80gb"),
)
SMALL_JOBS = 20


@dataclass(frozen=True, kw_only=True)
class Case:
    """One estimate to be timed."""

    name: str
    """What its row is called."""
    job: Job
    """What is trained."""
    plan: Plan
    """How."""
    cluster: Cluster
    """On what."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What one estimate took and said."""

    own_seconds: float
    """Processor time of this process, the worker and its child."""
    wall_seconds: float
    """From asking to the answer."""
    events: int
    """Of the allocator."""
    child_bytes: int
    """Peak resident memory of the process that ran the steps."""
    allocated_bytes: int
    """Peak allocated, the answer."""


def of_model(name: str) -> Case:
    """The row of a catalog model."""
    ref = resolve(name, offline=True)
    text = ref.config.get("text_config", ref.config)
    named = ("max_position_embeddings", "n_positions", "max_target_positions")
    positions = next((text[name] for name in named if text.get(name)), 4096)
    known = find_model(name)
    large = known is not None and known.parameters > LARGE_PARAMETERS
    card = parse_cluster("h100-80gb")
    return Case(
        name=name,
        job=Job(model=ref, seq_len=min(4096, positions)),
        plan=Plan(precision="bf16-true", checkpointing="full" if large else "none"),
        cluster=replace(card, device=card.device.with_capacity(CARD_BYTES)),
    )


def of_ranks(model: str, spec: str) -> Case:
    """A model under FSDP2 on a cluster."""
    cluster = parse_cluster(spec)
    return Case(
        name=f"{model}, FSDP2, {cluster.gpus} ranks",
        job=Job(model=resolve(model, offline=True), seq_len=4096),
        plan=Plan(shard="zero3", checkpointing="full"),
        cluster=cluster,
    )


def timed(case: Case, worker: Worker, *, fresh: bool = True) -> Timing:
    """Run the estimate once, or ask again for what was run."""
    wall, own = time.perf_counter(), _processor_seconds()
    made, repeated = usual_steps(TrainingCase(case.job, case.plan, case.cluster))
    asked = TrainingCase(case.job, case.plan, case.cluster)
    run = estimate(asked, steps=made, repeated=repeated, worker=worker, fresh=fresh)
    return Timing(
        own_seconds=_processor_seconds() - own,
        wall_seconds=time.perf_counter() - wall,
        events=run.traces[0].event_count,
        child_bytes=run.estimate.host.peak_bytes or 0,
        allocated_bytes=run.estimate.peak.allocated_bytes,
    )


def _processor_seconds() -> float:
    """Of this process, its children and theirs, which count when they have ended."""
    me = psutil.Process(os.getpid())
    workers = me.children()
    psutil.wait_procs([child for worker in workers for child in worker.children()])
    return sum(sum(process.cpu_times()[:4]) for process in (me, *workers))


def small_jobs(worker: Worker) -> float:
    """Small estimates a second, one after the other."""
    case = of_model("gpt2")
    began = time.perf_counter()
    for micro_batch in range(1, SMALL_JOBS + 1):
        job = replace(case.job, micro_batch=micro_batch, seq_len=128)
        estimate(TrainingCase(job, case.plan, case.cluster), worker=worker, fresh=True)
    return SMALL_JOBS / (time.perf_counter() - began)


def help_seconds() -> float:
    """What a user waits for `tonnage --help`; the fastest of three."""
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "tonnage", "--help"], stdout=subprocess.DEVNULL, check=True)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=None)
    parser.add_argument("--again", type=int, default=2)
    options = parser.parse_args()
    cases = [of_model(name) for name in options.models or model_names()]
    if not options.models:
        cases += [of_ranks(model, spec) for model, spec in RANKS]
    rows: list[tuple[float, str]] = []
    with Worker() as worker:
        for case in cases:
            try:
                timed(case, worker)
                best = min((timed(case, worker) for _ in range(options.again)), key=lambda timing: timing.own_seconds)
                kept = timed(case, worker, fresh=False)
            except TonnageError as error:
                rows.append((0.0, f"| {case.name} | - | - | - | - | - | {error} |"))
                continue
            rows.append((best.own_seconds, _row(case, best, kept)))
        rate = small_jobs(worker)
    print("| estimate | own, s | wall, s | again, s | events | child's peak, GiB | allocated, GiB |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(row for _, row in sorted(rows, reverse=True)))
    mine = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"\n{rate:.1f} small estimates a second (GPT-2, 128 tokens).  This process's peak: {mine / GIB:.2f} GiB.")
    print(f"`tonnage --help`: {help_seconds():.2f} s.")


def _row(case: Case, timing: Timing, kept: Timing) -> str:
    return (
        f"| {case.name} | {timing.own_seconds:.2f} | {timing.wall_seconds:.2f} | {kept.wall_seconds:.2f} "
        f"| {timing.events} "
        f"| {timing.child_bytes / GIB:.2f} | {timing.allocated_bytes / GIB:.2f} |"
    )


if __name__ == "__main__":
    main()
