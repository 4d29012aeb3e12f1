"""DDP's first buckets: whether they are gone when the second step needs the most.

DDP makes its buckets anew at the beginning of the second step.  NCCL keeps what it has averaged until its watchdog,
which looks ten times a second, has seen that it is done, and the same group exchanges something again; that is right
then, once, and only after the first gradients of the second step.  So in a short step the old buckets may still be
there at the peak.  Of 15 recordings of steps of 0.08 to 0.22 s on H200s and an H100, 6 had all of them, the others
none (measurements/, cases `shard-ddp` and `shard-zero1`).  A ghost's steps wait for the watchdog.
"""

from dataclasses import replace
from typing import Final

from tonnage.catalog.conventions import averages_by_ddp
from tonnage.cluster import CPU, Cluster
from tonnage.estimates.estimate import Estimate
from tonnage.mesh import axes
from tonnage.plans import Plan
from tonnage.units import size

CERTAIN_SECONDS: Final = 0.2
"""A micro-batch that takes so long leaves the watchdog the time to look between its averages and the next step."""

SEEN: Final = "6 of 15 that were recorded"
"""How often the old buckets were still there; tests count it in the records."""


def with_buckets(estimate: Estimate, plan: Plan, cluster: Cluster) -> Estimate:
    """The estimate with the old buckets in its upper end, where its steps are too short to be sure that they go."""
    return _widened(estimate) if _averages(plan, cluster) and not _is_certain(estimate) else estimate


def with_buckets_of_script(estimate: Estimate) -> Estimate:
    """The same of a script that was run, whose steps' seconds are not known, if its network was in torch's DDP."""
    averages = _DDP in estimate.model.get("module", "") and estimate.cluster["gpus"] > 1
    return _widened(estimate) if averages else estimate


_DDP: Final = "torch.nn.parallel.distributed"
"""The module that has it; Megatron has a class of the same name."""


def _widened(estimate: Estimate) -> Estimate:
    more_bytes = _higher(estimate, estimate.peak.by_category["communication"])
    if not more_bytes:
        return estimate
    said = (
        f"NCCL's watchdog, which looks every 100 ms, has let go of DDP's first buckets before the second step peaks; "
        f"{_seconds(estimate)} may be too short for that (it was in {SEEN}), and then the second "
        f"step peaks {size(more_bytes)} higher, which is in the interval"
    )
    peak = replace(estimate.peak, high_bytes=estimate.peak.high_bytes + more_bytes)
    coverage = replace(estimate.coverage, assumed=(*estimate.coverage.assumed, said))
    return replace(estimate, peak=peak, coverage=coverage)


def _averages(plan: Plan, cluster: Cluster) -> bool:
    """Whether it does so on several ranks of cards."""
    if not averages_by_ddp(plan) or cluster.device.id == CPU:
        return False
    return axes(plan, cluster.gpus, cluster.gpus_per_node).data_parallel > 1


def _is_certain(estimate: Estimate) -> bool:
    low_seconds = estimate.time.get("low_seconds")
    return low_seconds is not None and low_seconds / estimate.job["grad_accum"] >= CERTAIN_SECONDS


def _seconds(estimate: Estimate) -> str:
    seconds = estimate.time.get("step_seconds")
    return "a step whose time is not known" if seconds is None else f"a step of {seconds:.2f} s"


def _higher(estimate: Estimate, held_bytes: int) -> int:
    """By how much the peak grows if forward and backward of one step have so many bytes more; 0 if there are none."""
    if not held_bytes:
        return 0
    passes = [phase.allocated_bytes for phase in estimate.phases if phase.name in ("forward", "backward")]
    return max(0, max(passes, default=0) + held_bytes - estimate.peak.allocated_bytes)
