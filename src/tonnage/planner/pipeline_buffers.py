"""The buffers that a pipeline holds for the micro-batches that were not run.

Of a step with hundreds of micro-batches only a few are run, and what each of the others holds is added.  Torch's
stages (2.13) allocate the receive buffers of all micro-batches at the beginning and keep them
(`PipelineStage._prepare_forward_infra`).  The interleaved schedule waits for its sends when the step ends, and keeps
what it sent until then (`send_ops` of `_PipelineScheduleRuntime`).  Token ids and labels of all micro-batches are on
the card, and their losses on the last stage.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, TypeVar

from tonnage.cluster import Cluster
from tonnage.estimates.estimate import Estimate, Moment, PhasePeak, StepPeak
from tonnage.job import Job
from tonnage.mesh import SHARDING, make_mesh
from tonnage.planner.probe import Probe
from tonnage.planner.solution import Candidate
from tonnage.plans import Plan
from tonnage.techniques.tensor_parallel import divides_sequence
from tonnage.units import format_size

_ID_BYTES: Final = 2 * 8
"""Bytes of a token: its number and its label."""

_LOSS_BYTES: Final = 512
"""The allocator's smallest block, which holds a loss."""

CATEGORY: Final = "communication"


def buffer_bytes(candidate: Candidate, cluster: Cluster, rank: int = 0) -> int:
    """Return the bytes that a rank of a pipeline holds for each micro-batch of a step from its beginning."""
    stage = make_mesh(candidate.plan, cluster.gpus, cluster.gpus_per_node).place(rank, "pp")
    return buffer_bytes_at(candidate, stage)


def buffer_bytes_at(candidate: Candidate, stage: int) -> int:
    """Return the same for the ranks at a position of the pipeline, the first of which is 0."""
    job, plan = candidate.job, candidate.plan
    if plan.pp == 1:
        return 0
    text = job.model.text
    tokens = job.seq_len * job.micro_batch // plan.cp
    hidden = tokens * int(text.get("hidden_size", 0)) * _element_bytes(plan)
    parts = plan.tp if divides_sequence(plan) else 1
    buffers = _count_buffers(plan, stage) * hidden // parts
    return buffers + _ID_BYTES * tokens + _LOSS_BYTES * (stage == plan.pp - 1)


def _element_bytes(plan: Plan) -> int:
    """Return the bytes of an element that stages send: FSDP2 casts inputs itself, autocast leaves them in fp32."""
    return 4 if plan.precision == "fp32" or (plan.precision.endswith("-mixed") and plan.shard not in SHARDING) else 2


def _count_buffers(plan: Plan, stage: int) -> int:
    """Return how many tensors a rank keeps for each micro-batch: received hidden states and gradients.

    The first stage receives no hidden states, the last no gradients.  An interleaved schedule also keeps what it
    sends, which is as much.
    """
    interleaved = plan.pp_schedule == "interleaved"
    received = 2 * (plan.pp_stages if interleaved else 1) - (stage == 0) - (stage == plan.pp - 1)
    return received * (2 if interleaved else 1)


def add_to_probe(probe: Probe, more: int) -> Probe:
    """Return a probe with more bytes that are there from the beginning."""
    held = {**probe.by_category, CATEGORY: probe.by_category.get(CATEGORY, 0) + more}
    moments = {moment: most + more * (moment.phase != "load") for moment, most in probe.allocated_bytes.items()}
    return Probe(allocated_bytes=moments, by_category=held)


def add_to_estimate(estimate: Estimate, more: int, job: Job, cluster: Cluster) -> Estimate:
    """Return an estimate with more bytes for the micro-batches of `job` that were not run."""
    if not more:
        return estimate
    peak = replace(
        estimate.peak,
        **{
            name: getattr(estimate.peak, name) + more
            for name in ("allocated_bytes", "reserved_bytes", "process_bytes", "low_bytes", "high_bytes")
        },
        by_category={**estimate.peak.by_category, CATEGORY: estimate.peak.by_category[CATEGORY] + more},
    )
    fits = peak.process_bytes <= cluster.device.capacity_bytes
    left = job.grad_accum - int(estimate.job["grad_accum"])
    words = (
        f"what {left} more micro-batches receive, and their tokens, which are there from the "
        f"beginning: {format_size(more)}"
    )
    return replace(
        estimate,
        fits=estimate.fits_card and fits,
        peak=peak,
        phases=tuple(phase if phase.name == "load" else _raise_level(phase, more) for phase in estimate.phases),
        steps=tuple(_raise_level(step, more) for step in estimate.steps),
        curve=tuple(point if point.phase == "load" else _raise_level(point, more) for point in estimate.curve),
        ranks=tuple(
            {
                **rank,
                **{name: rank[name] + more for name in ("allocated_bytes", "reserved_bytes", "process_bytes")},
                "fits": rank["fits"] and fits,
            }
            for rank in estimate.ranks
        ),
        coverage=replace(estimate.coverage, modelled=(*estimate.coverage.modelled, words)),
    )


_Level = TypeVar("_Level", PhasePeak, StepPeak, Moment)


def _raise_level(level: _Level, more: int) -> _Level:
    return replace(level, allocated_bytes=level.allocated_bytes + more, reserved_bytes=level.reserved_bytes + more)
