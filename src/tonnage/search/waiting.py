"""What a pipeline holds for micro-batches that were not run.

Of a step with hundreds of micro-batches only a few are run, and what each of the others takes is added.  Torch's
stages (2.13) make what they receive for every micro-batch at the beginning and keep it
(`PipelineStage._prepare_forward_infra`); the interleaved schedule waits for what it sent when the step ends, and
until then that is kept too (`send_ops` of `_PipelineScheduleRuntime`); token ids and labels of all are on the card,
and the losses on the last stage.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, TypeVar

from tonnage.cluster import Cluster
from tonnage.estimates.estimate import Estimate, Moment, PhasePeak, StepPeak
from tonnage.job import Job
from tonnage.mesh import SHARDING, axes
from tonnage.planner.solution import Candidate
from tonnage.plans import Plan
from tonnage.search.depth import Look
from tonnage.techniques.tensor_parallel import divides_sequence
from tonnage.units import size

_ID_BYTES: Final = 2 * 8
"""Of a token: its number and its label."""

_LOSS_BYTES: Final = 512
"""The allocator's smallest block, which holds a loss."""

CATEGORY: Final = "communication"


def waiting_bytes(candidate: Candidate, cluster: Cluster, rank: int = 0) -> int:
    """Bytes that each micro-batch of a step takes on a rank of a pipeline, whether it is under way or not."""
    place = axes(candidate.plan, cluster.gpus, cluster.gpus_per_node).place(rank, "pp")
    return waiting_at(candidate, place)


def waiting_at(candidate: Candidate, place: int) -> int:
    """The same on the ranks at a place of the pipeline, the first of which is 0."""
    job, plan = candidate.job, candidate.plan
    if plan.pp == 1:
        return 0
    text = job.model.text
    tokens = job.seq_len * job.micro_batch // plan.cp
    hidden = tokens * int(text.get("hidden_size", 0)) * _stream_bytes(plan)
    parts = plan.tp if divides_sequence(plan) else 1
    return _handed(plan, place) * hidden // parts + _ID_BYTES * tokens + _LOSS_BYTES * (place == plan.pp - 1)


def _stream_bytes(plan: Plan) -> int:
    """Of an element that stages hand on: FSDP2 casts inputs itself, autocast leaves the stream in fp32."""
    return 4 if plan.precision == "fp32" or (plan.precision.endswith("-mixed") and plan.shard not in SHARDING) else 2


def _handed(plan: Plan, place: int) -> int:
    """What stages of a rank get of each micro-batch and keep: hidden states but the first, gradients but the last.

    Of an interleaved schedule also what they send, which is as much.
    """
    interleaved = plan.pp_schedule == "interleaved"
    received = 2 * (plan.pp_stages if interleaved else 1) - (place == 0) - (place == plan.pp - 1)
    return received * (2 if interleaved else 1)


def looked(look: Look, more: int) -> Look:
    """A look with so many bytes more, there from the beginning."""
    held = {**look.by_category, CATEGORY: look.by_category.get(CATEGORY, 0) + more}
    moments = {one: most + more * (one.phase != "load") for one, most in look.allocated_bytes.items()}
    return Look(allocated_bytes=moments, by_category=held)


def estimated(found: Estimate, more: int, job: Job, cluster: Cluster) -> Estimate:
    """An estimate with so many bytes more for the micro-batches of `job` that were not run."""
    if not more:
        return found
    peak = replace(
        found.peak,
        **{
            name: getattr(found.peak, name) + more
            for name in ("allocated_bytes", "reserved_bytes", "process_bytes", "low_bytes", "high_bytes")
        },
        by_category={**found.peak.by_category, CATEGORY: found.peak.by_category[CATEGORY] + more},
    )
    left = job.grad_accum - int(found.job["grad_accum"])
    words = (
        f"what {left} more micro-batches receive, and their tokens, which are there from the beginning: {size(more)}"
    )
    return replace(
        found,
        fits=found.fits and peak.process_bytes <= cluster.device.capacity_bytes,
        peak=peak,
        phases=tuple(one if one.name == "load" else _higher(one, more) for one in found.phases),
        steps=tuple(_higher(one, more) for one in found.steps),
        curve=tuple(one if one.phase == "load" else _higher(one, more) for one in found.curve),
        ranks=tuple(
            {**one, **{name: one[name] + more for name in ("allocated_bytes", "reserved_bytes", "process_bytes")}}
            for one in found.ranks
        ),
        coverage=replace(found.coverage, modelled=(*found.coverage.modelled, words)),
    )


_Level = TypeVar("_Level", PhasePeak, StepPeak, Moment)


def _higher(one: _Level, more: int) -> _Level:
    return replace(one, allocated_bytes=one.allocated_bytes + more, reserved_bytes=one.reserved_bytes + more)
