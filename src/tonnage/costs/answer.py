"""The time of an Estimate: what the time model says of a Job under a Plan, or why it says nothing."""

from dataclasses import replace
from typing import Any

from tonnage.costs.blend import blended
from tonnage.costs.software import software_of
from tonnage.costs.stacks import stacks
from tonnage.costs.timing import Timing, timing, together
from tonnage.costs.work import Work
from tonnage.device import Cluster
from tonnage.errors import CannotEstimate
from tonnage.estimates import Estimate
from tonnage.job import Job
from tonnage.plans import Plan
from tonnage.summary import Run


def with_time(run: Run, job: Job, plan: Plan, cluster: Cluster) -> Run:
    """The run with the seconds of a step in its estimate, or with a sentence why they are not known."""
    return replace(run, estimate=timed(run.estimate, job, plan, cluster))


def timed(estimate: Estimate, job: Job, plan: Plan, cluster: Cluster) -> Estimate:
    """The estimate with its time; `job` has its accumulation steps decided."""
    try:
        known = price_of_run(estimate, job, plan, cluster)
    except CannotEstimate as error:
        return _saying(estimate, f"time: unknown. {error}")
    code = software_of(plan.engine)
    said = f"time: costs of {code.name} code, calibrated on {code.rows}"
    return _saying(replace(estimate, time=as_time(known)), said, *known.assumed)


def price_of_run(estimate: Estimate, job: Job, plan: Plan, cluster: Cluster) -> Timing:
    """The Timing of what was run: how much runs again under a budget is known from the run alone.

    Raises CannotEstimate as `price` does.
    """
    run_again = estimate.model.get("run_again")
    if run_again is None:
        return price(job, plan, cluster)
    offload = (
        "none" if plan.activation_offload == "cpu-streamed" else plan.activation_offload
    )  # it sends what it can hide
    none, full, selective = (
        price(job, replace(plan, checkpointing=way, activation_offload=offload), cluster)
        for way in ("none", "full", "selective")
    )
    return blended(none, full, selective, run_again)


def _saying(estimate: Estimate, *sentences: str) -> Estimate:
    coverage = estimate.coverage
    return replace(estimate, coverage=replace(coverage, modelled=(*coverage.modelled, *sentences)))


def price(job: Job, plan: Plan, cluster: Cluster, work: Work | None = None) -> Timing:
    """The Timing of a job's step; `work` is what `Work.of` says of it, where that is known already.

    Raises CannotEstimate where a network, a card or a link is not known.
    """
    if job.model.kind != "config":
        raise CannotEstimate("The time of a network that a factory builds is not known; its memory is.")
    if "nvme" in (plan.activation_offload, plan.optimizer_offload.partition("=")[0], plan.param_offload):
        raise CannotEstimate("How fast this machine's files are is not known, so neither is the step's time.")
    work, code = work or Work.of(job, plan, cluster), software_of(plan.engine)
    found = stacks(job)
    if found[0].shape.vocab and len(found) == 1:
        return timing(found[0].shape, work, cluster, code)
    layout = work.axes
    if max(layout.tp, layout.pp, layout.cp, layout.ep) > 1:
        kind = job.model.config["model_type"]
        raise CannotEstimate(f"The time of a {kind!r} network divided otherwise than by its data is not known.")
    timings = [
        timing(
            one.shape,
            replace(work, seq_len=one.seq_len, micro_batch=work.micro_batch * one.sequences, packing=1),
            cluster,
            code,
        )
        for one in found
    ]
    last = found[-1]
    tokens = last.seq_len * last.sequences * work.micro_batch * work.grad_accum
    names = ", ".join(one.name for one in found)
    return together(timings, tokens, f"time: of {names}, one after the other; tokens are those of {last.name}")


def as_time(known: Timing) -> dict[str, Any]:
    """The `time` of an Estimate's document."""
    return {
        "step_seconds": known.step_seconds,
        "low_seconds": known.low_seconds,
        "high_seconds": known.high_seconds,
        "tokens_per_second_per_gpu": known.tokens_per_second_per_gpu,
        "mfu": known.mfu,
        "bound_by": known.bound_by,
    }
