"""One trial run: one rank of a candidate, executed on a ghost.

A whole run makes a few steps of a candidate on the real card's memory; a probe makes one step, of a few layers if the
network is deep, on a card where everything fits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

from tonnage.case import Case
from tonnage.cluster import Cluster
from tonnage.errors import UsageError
from tonnage.estimates import predict
from tonnage.estimates.estimate import Estimate
from tonnage.job import Job
from tonnage.mesh import make_mesh
from tonnage.planner.bounds import estimate_first_rank_extra
from tonnage.planner.pipeline_buffers import add_to_estimate, add_to_probe, buffer_bytes
from tonnage.planner.pricing import find_shape
from tonnage.planner.probe import Probe, summarize_trace
from tonnage.planner.solution import Candidate
from tonnage.shallow.depths import choose_probe_depths, is_repetitive, layers_of, roomy, with_layers
from tonnage.timing.work import Work

if TYPE_CHECKING:
    from tonnage.workers.worker import Worker

STEPS: Final = 3
"""Steps of a whole run: the first makes optimizer states, the second holds them, the third is as all others.

Steps after the first repeat its requests (`tonnage_inside.repeating`), unless a step depends on those before it."""

PROBE_STEPS: Final = 1
"""Steps of a probe: `depth.summarize_trace` derives what the later ones need."""

MICRO_BATCHES: Final = 2
"""Micro-batches of a step: the first makes gradients, the second adds to them, as all others do.

A pipeline gets one more than it has stages, so that its first stage holds as many at once as it ever does; an
interleaved one gets two rounds of its ranks.  The buffers of the others are added (`pipeline_buffers`)."""


@dataclass(frozen=True)
class TrialRun:
    """One rank of a candidate, to be run."""

    candidate: Candidate
    cluster: Cluster
    steps: int
    repeated: int
    """Further steps that only repeat the first one's requests."""
    rank: int
    is_probe: bool
    """True if only the memory need is wanted."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Return what decides the answer; the model's configuration is not hashable, so its text is used."""
        job = self.candidate.job
        shape = tuple(getattr(job, item.name) for item in fields(job) if item.name != "model")
        run = (self.candidate.plan, self.cluster, self.steps, self.repeated, self.rank, self.is_probe)
        return (job.model.name, repr(job.model.config), *shape, *run)

    def execute(self, worker: Worker) -> Estimate | Probe:
        """Return the answer, with the pipeline buffers of the micro-batches that are not run."""
        full_job, plan = self.candidate.job, self.candidate.plan
        job = replace(full_job, grad_accum=count_micro_batches(self.candidate))
        each = buffer_bytes(self.candidate, self.cluster, self.rank)
        more = (full_job.grad_accum - job.grad_accum) * each
        if self.is_probe:
            trace = predict.trace(Case(job, plan, self.cluster), rank=self.rank, steps=self.steps, worker=worker)
            return add_to_probe(summarize_trace(trace, self.cluster, by_module=plan.pp == 1), more)
        answer = predict.estimate(
            Case(job, plan, self.cluster),
            steps=self.steps,
            repeated=self.repeated,
            few_layers=True,
            rank=self.rank,
            worker=worker,
        )
        return _as_whole_step(add_to_estimate(answer.estimate, more, full_job, self.cluster), full_job, job)


@dataclass(frozen=True)
class ShownRun:
    """All ranks of a candidate, run as `tonnage estimate` runs them."""

    candidate: Candidate
    cluster: Cluster

    @property
    def key(self) -> tuple[Any, ...]:
        """Return what decides the answer."""
        return ("shown", *run_of_fullest_rank(self.candidate, self.cluster).key)

    def execute(self, worker: Worker) -> Estimate:
        """Return the estimate that `tonnage estimate` shows."""
        case = Case(self.candidate.job, self.candidate.plan, self.cluster)
        return predict.answer(case, worker=worker).estimate


QUICK: Final = 300
"""Layers of all micro-batches and ranks up to which a plan is run as `tonnage estimate` runs it: about a second."""


def is_quick(candidate: Candidate, cluster: Cluster) -> bool:
    """Return whether all ranks of a candidate take about a second with all their micro-batches."""
    layers = layers_of(candidate.job) or 1
    return layers * candidate.job.grad_accum * len(list_ranks(candidate, cluster)) <= QUICK


def run_of_fullest_rank(candidate: Candidate, cluster: Cluster) -> TrialRun:
    """Return the whole run of the rank that is likely to need most."""
    return _whole_run(candidate, cluster, guess_fullest_rank(candidate, cluster))


def runs_of_other_ranks(candidate: Candidate, cluster: Cluster) -> list[TrialRun]:
    """Return the whole runs of the other ranks."""
    first = guess_fullest_rank(candidate, cluster)
    return [_whole_run(candidate, cluster, rank) for rank in list_ranks(candidate, cluster) if rank != first]


def _whole_run(candidate: Candidate, cluster: Cluster, rank: int) -> TrialRun:
    return TrialRun(candidate, cluster, *count_steps(candidate), rank, is_probe=False)


def list_probes(candidate: Candidate, cluster: Cluster) -> list[TrialRun]:
    """Return the probes that tell what a candidate needs: of itself, or of two shallower networks."""
    found = choose_probe_depths(candidate.job, candidate.plan)
    shallow = [replace(candidate, job=with_layers(candidate.job, layers)) for layers in found or ()]
    return [probe_of(candidate, cluster, network) for network in shallow or [candidate]]


def probe_of(candidate: Candidate, cluster: Cluster, network: Candidate | None = None) -> TrialRun:
    """Return the probe of a candidate, or of a shallower network in its place."""
    rank, probed = guess_fullest_rank(candidate, cluster), network or candidate
    return TrialRun(probed, roomy(cluster), _count_probe_steps(probed), 0, rank, is_probe=True)


def list_ranks(candidate: Candidate, cluster: Cluster) -> tuple[int, ...]:
    """Return the ranks that may need most; for a plan that does not divide the first, whose run will say so."""
    try:
        return make_mesh(candidate.plan, cluster.gpus, cluster.gpus_per_node).different
    except UsageError:
        return (0,)


def guess_fullest_rank(candidate: Candidate, cluster: Cluster) -> int:
    """Return the rank that is likely to need most.

    In a pipeline that is the first, which has the embedding and most micro-batches in flight, or the second, whose
    buffers are larger.
    """
    first, *others = list_ranks(candidate, cluster)
    shape = find_shape(candidate)
    if not others or shape is None:
        return first
    more = buffer_bytes(candidate, cluster, others[0]) - buffer_bytes(candidate, cluster, first)
    work = Work.of(candidate.job, candidate.plan, cluster)
    return others[0] if candidate.job.grad_accum * more > estimate_first_rank_extra(shape, work) else first


def count_micro_batches(candidate: Candidate) -> int:
    """Return how many micro-batches of a step are run; further ones would do nothing new."""
    job, plan = candidate.job, candidate.plan
    if plan.pp > 1 and plan.pp_schedule == "interleaved":
        return min(job.grad_accum, 2 * plan.pp)
    return min(job.grad_accum, MICRO_BATCHES if plan.pp == 1 else plan.pp + 1)


def count_steps(candidate: Candidate) -> tuple[int, int]:
    """Return how many steps a whole run makes, and how many more only repeat the first one's requests."""
    job, plan = candidate.job, candidate.plan
    return (1, STEPS - 1) if is_repetitive(job, plan) else (STEPS, 0)


def _count_probe_steps(candidate: Candidate) -> int:
    """Return the steps of a probe; a budget acts from the second micro-batch on."""
    return PROBE_STEPS + 1 if candidate.plan.checkpointing.startswith("budget") else PROBE_STEPS


def _as_whole_step(estimate: Estimate, full_job: Job, run_job: Job) -> Estimate:
    """Return the estimate with the whole step's accumulation, and a note of how much of it was run."""
    if full_job.grad_accum == run_job.grad_accum:
        return estimate
    counts = f"{run_job.grad_accum} of {full_job.grad_accum}"
    words = f"{counts} micro-batches of a step were run: the others are like the last"
    coverage = replace(estimate.coverage, run=(*estimate.coverage.run, words))
    return replace(estimate, job={**estimate.job, "grad_accum": full_job.grad_accum}, coverage=coverage)
