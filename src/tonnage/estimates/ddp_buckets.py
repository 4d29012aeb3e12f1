"""DDP's first buckets: whether they are freed before the second step peaks.

DDP rebuilds its buckets at the beginning of the second step.  NCCL keeps what it has averaged until its watchdog,
which checks ten times a second, has seen that it is done, and the same group exchanges something again; that happens
then, once, and only after the first gradients of the second step.  So in a short step the old buckets may still exist
at the peak.  Of 15 recordings of steps of 0.08 to 0.22 s on H200s and an H100, 6 had all of them, the others none
(measurements/, cases `shard-ddp` and `shard-zero1`).  A ghost's steps wait for the watchdog.
"""

from dataclasses import replace
from typing import Final

from tonnage.catalog.conventions import averages_by_ddp
from tonnage.cluster import CPU, Cluster
from tonnage.estimates.estimate import Estimate
from tonnage.mesh import make_mesh
from tonnage.plans import Plan
from tonnage.units import format_size

CERTAIN_SECONDS: Final = 0.2
"""Duration of a micro-batch that lets the watchdog check between its averages and the next step."""

SEEN: Final = "6 of 15 that were recorded"
"""Share of recordings in which the old buckets still existed; tests count it in the records."""


def with_buckets(estimate: Estimate, plan: Plan, cluster: Cluster) -> Estimate:
    """Return the estimate with the old buckets in its upper end, if its steps may be too short to free them."""
    return _widen(estimate) if _averages_by_ddp(plan, cluster) and not _is_certain(estimate) else estimate


def with_buckets_of_script(estimate: Estimate) -> Estimate:
    """Return the same for a script that was run, whose seconds are not known, if its network was in torch's DDP."""
    averages = _DDP_MODULE in estimate.model.get("module", "") and estimate.cluster["gpus"] > 1
    return _widen(estimate) if averages else estimate


_DDP_MODULE: Final = "torch.nn.parallel.distributed"
"""The module of torch's class; Megatron has a class of the same name."""


def _widen(estimate: Estimate) -> Estimate:
    more_bytes = _added_peak_bytes(estimate, estimate.peak.by_category["communication"])
    if not more_bytes:
        return estimate
    sentence = (
        f"NCCL's watchdog, which checks every 100 ms, has freed DDP's first buckets before the second step peaks; "
        f"{_describe_step(estimate)} may be too short for that (it was in {SEEN}), and then the second "
        f"step peaks {format_size(more_bytes)} higher, which is in the interval"
    )
    peak = replace(estimate.peak, high_bytes=estimate.peak.high_bytes + more_bytes)
    coverage = replace(estimate.coverage, assumed=(*estimate.coverage.assumed, sentence))
    return replace(estimate, peak=peak, coverage=coverage)


def _averages_by_ddp(plan: Plan, cluster: Cluster) -> bool:
    """Return True if DDP averages gradients over several ranks of GPUs."""
    if not averages_by_ddp(plan) or cluster.device.id == CPU:
        return False
    return make_mesh(plan, cluster.gpus, cluster.gpus_per_node).data_parallel > 1


def _is_certain(estimate: Estimate) -> bool:
    low_seconds = estimate.time.get("low_seconds")
    return low_seconds is not None and low_seconds / estimate.job["grad_accum"] >= CERTAIN_SECONDS


def _describe_step(estimate: Estimate) -> str:
    seconds = estimate.time.get("step_seconds")
    return "a step whose time is not known" if seconds is None else f"a step of {seconds:.2f} s"


def _added_peak_bytes(estimate: Estimate, held_bytes: int) -> int:
    """Return by how much the peak grows if forward and backward of one step hold so many more bytes; 0 if there
    are none.
    """
    if not held_bytes:
        return 0
    passes = [phase.allocated_bytes for phase in estimate.phases if phase.name in ("forward", "backward")]
    return max(0, max(passes, default=0) + held_bytes - estimate.peak.allocated_bytes)
