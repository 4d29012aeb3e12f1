"""The time of an Estimate: what the time model says of a Job under a Plan, or why it says nothing."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from tonnage.case import Case
from tonnage.cluster import Cluster
from tonnage.errors import CannotEstimate, UnknownNetwork
from tonnage.estimates.estimate import Estimate
from tonnage.estimates.summary import Run
from tonnage.job import Job
from tonnage.mesh import axes
from tonnage.plans import Plan
from tonnage.timing.blend import averaged, blended, padded_lengths
from tonnage.timing.replay import priced
from tonnage.timing.software import software_of
from tonnage.timing.stacks import stacks
from tonnage.timing.timing import STACKED, Timing, timing, together
from tonnage.timing.work import Work
from tonnage.trace.operations import Worked


def with_time(run: Run, case: Case, seen: Sequence[Worked] = ()) -> Run:
    """The run with the seconds of a step in its estimate, or with a sentence why they are not known.

    `seen`: what the operations of a step work, of each rank of which that was counted.
    """
    estimate = run.estimate
    known = played(estimate, seen, case.cluster, case.job, case.plan) if seen else timed(estimate, case)
    return replace(run, estimate=known)


def timed(estimate: Estimate, case: Case) -> Estimate:
    """The estimate with its time; `job` has its accumulation steps decided."""
    try:
        known = price_of_run(estimate, case)
    except CannotEstimate as error:
        return saying(estimate, f"time: unknown. {error}")
    code = software_of(case.plan.engine)
    said = f"time: costs of {code.name} code, calibrated on {code.rows}"
    return saying(replace(estimate, time=as_time(known)), said, *known.assumed)


def price_of_run(estimate: Estimate, case: Case) -> Timing:
    """The Timing of what was run: how much runs again under a budget is known from the run alone.

    Raises CannotEstimate as `price` does.
    """
    plan = case.plan
    run_again = estimate.model.get("run_again")
    if run_again is None:
        return price(case)
    offload = (
        "none" if plan.activation_offload == "cpu-streamed" else plan.activation_offload
    )  # it sends what it can hide
    none, full, selective = (
        price(Case(case.job, replace(plan, checkpointing=way, activation_offload=offload), case.cluster))
        for way in ("none", "full", "selective")
    )
    return blended(none, full, selective, run_again)


def is_better_seen(case: Case) -> bool:
    """Whether a step's seconds are not known from the network's dimensions, or only roughly (several stacks)."""
    plan = case.plan
    if "nvme" in (plan.activation_offload, plan.optimizer_offload.partition("=")[0], plan.param_offload):
        return False
    try:
        if _has_stacks(case.job):
            return True
        price(case)
    except UnknownNetwork:
        return True
    except CannotEstimate:
        return False
    return False


def _has_stacks(job: Job) -> bool:
    """Whether a network has several stacks of layers, of which few steps were measured."""
    try:
        return job.model.kind == "config" and len(stacks(job)) > 1
    except UnknownNetwork:
        return False


def played(
    estimate: Estimate, seen: Sequence[Worked], cluster: Cluster, job: Job | None = None, plan: Plan | None = None
) -> Estimate:
    """The estimate with the seconds of a step of which each operation was seen; job and plan are none of a script."""
    try:
        if plan is not None:
            _check_seen(plan)
        found = max((priced(one, cluster, software_of("tonnage")) for one in seen), key=lambda one: one.step_seconds)
    except CannotEstimate as error:
        return saying(estimate, f"time: unknown. {error}")
    said = f"time: of {found.operations:,} operations of a step, counted as they were launched and priced one by one"
    tokens = None if job is None or plan is None else _tokens(Case(job, plan, cluster))
    low, high = STACKED if job is not None and _has_stacks(job) else (1.0, 1.0)
    time = {
        "step_seconds": found.step_seconds,
        "low_seconds": min(found.low_seconds, low * found.step_seconds),
        "high_seconds": max(found.high_seconds, high * found.step_seconds),
        "tokens_per_second_per_gpu": None if tokens is None else tokens / found.step_seconds,
        "mfu": found.mfu,
        "bound_by": found.bound_by,
    }
    return saying(replace(estimate, time=time), f"{said}, at the pace of {found.rows}", *found.assumed)


def _check_seen(plan: Plan) -> None:
    """Raise CannotEstimate where ranks or the host are waited for, which no rank's own step shows."""
    if plan.pp > 1:
        raise CannotEstimate("How long the stages of a pipeline wait for each other was not seen.")
    if plan.optimizer_offload != "none" or plan.param_offload != "none":
        raise CannotEstimate("How long the host takes to update was not seen.")


def _tokens(case: Case) -> float:
    """Of the step on each GPU."""
    job = case.job
    laid = axes(case.plan, case.cluster.gpus, case.cluster.gpus_per_node)
    return job.seq_len * job.micro_batch * job.grad_accum * laid.data_parallel / laid.ranks


def saying(estimate: Estimate, *sentences: str) -> Estimate:
    """The estimate with further sentences about what is modelled."""
    coverage = estimate.coverage
    return replace(estimate, coverage=replace(coverage, modelled=(*coverage.modelled, *sentences)))


def price(case: Case, work: Work | None = None) -> Timing:
    """The Timing of a job's step; `work` is what `Work.of` says of it, where that is known already.

    Raises CannotEstimate where a network, a card or a link is not known.
    """
    job, plan = case.job, case.plan
    if job.model.kind != "config":
        raise UnknownNetwork("The time of a network that a factory builds is not known; its memory is.")
    if "nvme" in (plan.activation_offload, plan.optimizer_offload.partition("=")[0], plan.param_offload):
        raise CannotEstimate("How fast this machine's files are is not known, so neither is the step's time.")
    if job.lengths:
        return _of_lengths(case)
    work, code = work or Work.of(case.job, case.plan, case.cluster), software_of(plan.engine)
    found = stacks(job)
    if found[0].shape.vocab and len(found) == 1:
        return timing(found[0].shape, work, case.cluster, code)
    layout = work.axes
    if max(layout.tp, layout.pp, layout.cp, layout.ep) > 1:
        kind = job.model.config["model_type"]
        raise UnknownNetwork(f"The time of a {kind!r} network divided otherwise than by its data is not known.")
    timings = [
        timing(
            one.shape,
            replace(work, seq_len=one.seq_len, micro_batch=work.micro_batch * one.sequences, packing=1),
            case.cluster,
            code,
        )
        for one in found
    ]
    last = found[-1]
    tokens = last.seq_len * last.sequences * work.micro_batch * work.grad_accum
    names = ", ".join(one.name for one in found)
    return together(timings, tokens, f"time: of {names}, one after the other; tokens are those of {last.name}")


def _of_lengths(case: Case) -> Timing:
    """Of micro-batches whose sequences are as long as is drawn, each padded to its longest."""
    job = case.job
    lengths = [min(int(length), job.seq_len) for length in job.lengths]
    padded = padded_lengths(lengths, job.seq_len, job.micro_batch)
    found: dict[Timing, float] = {}
    for length, often in padded.items():
        alike = replace(job, lengths=(), seq_len=max(1, round(length)))
        one = price(Case(alike, case.plan, case.cluster))
        found[one] = found.get(one, 0.0) + often
    filled = mean(lengths) / sum(length * often for length, often in padded.items())
    of_drawn = averaged(found, filled)
    said = f"time: an average over the drawn lengths; {100 * filled:.0f} % of the tokens are no padding, and counted"
    return replace(of_drawn, assumed=(*of_drawn.assumed, said))


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
