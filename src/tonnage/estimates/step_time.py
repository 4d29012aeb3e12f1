"""The time of an Estimate: the time model's seconds of a step, or a sentence why they are not known."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from tonnage.case import Case
from tonnage.cluster import Cluster
from tonnage.errors import CannotEstimate, UnknownNetwork
from tonnage.estimates.estimate import Estimate
from tonnage.estimates.from_traces import Run
from tonnage.job import Job
from tonnage.mesh import make_mesh
from tonnage.plans import Plan
from tonnage.shallow.depths import counted_micro_batches
from tonnage.timing.blend import average_steps, blend_recomputation, padded_lengths
from tonnage.timing.replay import ReplayedStep, replay_step
from tonnage.timing.software import software_of
from tonnage.timing.stacks import read_stacks
from tonnage.timing.timing import STACKED, Timing, sum_stacks, time_step
from tonnage.timing.work import Work
from tonnage.trace.operations import StepOperations, with_another_micro_batch


def with_time(run: Run, case: Case, seen: Sequence[StepOperations] = ()) -> Run:
    """Return the run with the seconds of a step in its estimate, or with a sentence why they are not known.

    A step that does not fit takes no time.  `seen` has the operations of a step of each rank for which they were
    counted.
    """
    estimate = run.estimate
    if not estimate.fits_card:
        return run
    timed_estimate = (
        add_counted_time(estimate, seen, case.cluster, case.job, case.plan) if seen else add_time(estimate, case)
    )
    return replace(run, estimate=timed_estimate)


def add_time(estimate: Estimate, case: Case) -> Estimate:
    """Return the estimate with its time; `job` has its accumulation steps decided."""
    try:
        step_timing = price_of_run(estimate, case)
    except CannotEstimate as error:
        return saying(estimate, f"time: unknown. {error}")
    code = software_of(case.plan.engine)
    sentence = f"time: costs of {code.name} code, calibrated on {code.rows}"
    return saying(replace(estimate, time=as_time(step_timing)), sentence, *step_timing.assumed)


def price_of_run(estimate: Estimate, case: Case) -> Timing:
    """Return the Timing of what was run: only the run tells how much runs again under a budget.

    Raises CannotEstimate as `price` does.
    """
    plan = case.plan
    run_again = estimate.model.get("run_again")
    if run_again is None:
        return price(case)
    streams = plan.activation_offload == "cpu-streamed"  # the budget sends only what it can overlap
    offload = "none" if streams else plan.activation_offload
    without, with_full, selective = (
        price(Case(case.job, replace(plan, checkpointing=kind, activation_offload=offload), case.cluster))
        for kind in ("none", "full", "selective")
    )
    return blend_recomputation(without, with_full, selective, run_again)


def needs_counting(case: Case) -> bool:
    """Return True if the network's dimensions do not give a step's seconds, or only roughly (several stacks)."""
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
    """Return True for a network with several stacks of layers, of which few steps were measured."""
    try:
        return job.model.kind == "config" and len(read_stacks(job)) > 1
    except UnknownNetwork:
        return False


def add_counted_time(
    estimate: Estimate,
    seen: Sequence[StepOperations],
    cluster: Cluster,
    job: Job | None = None,
    plan: Plan | None = None,
) -> Estimate:
    """Return the estimate with the seconds of a step from its counted operations; a script has neither job nor
    plan.
    """
    try:
        if plan is not None:
            _check_independent(plan)
        further = 0 if job is None or plan is None else job.grad_accum - counted_micro_batches(job, plan)
        timings = (_replay(operations, cluster, further) for operations in seen)
        slowest = max(timings, key=lambda timing: timing.step_seconds)
    except CannotEstimate as error:
        return saying(estimate, f"time: unknown. {error}")
    sentence = (
        f"time: of {slowest.operations:,} operations of a step, counted as they were launched and priced one by one"
    )
    tokens = None if job is None or plan is None else _tokens_per_gpu(Case(job, plan, cluster))
    low, high = STACKED if job is not None and _has_stacks(job) else (1.0, 1.0)
    time = {
        "step_seconds": slowest.step_seconds,
        "low_seconds": min(slowest.low_seconds, low * slowest.step_seconds),
        "high_seconds": max(slowest.high_seconds, high * slowest.step_seconds),
        "tokens_per_second_per_gpu": None if tokens is None else tokens / slowest.step_seconds,
        "mfu": slowest.mfu,
        "bound_by": slowest.bound_by,
    }
    return saying(replace(estimate, time=time), f"{sentence}, at the pace of {slowest.rows}", *slowest.assumed)


def _replay(counted: StepOperations, cluster: Cluster, further: int) -> ReplayedStep:
    """Return the replayed step with `further` micro-batches like the last one that was counted."""
    known = replay_step(counted, cluster, software_of("tonnage"))
    if not further:
        return known
    longer = replay_step(with_another_micro_batch(counted), cluster, software_of("tonnage"))
    seconds = known.step_seconds + further * (longer.step_seconds - known.step_seconds)
    ratio = seconds / known.step_seconds
    flops = known.mfu * known.step_seconds
    more_flops = longer.mfu * longer.step_seconds - flops
    return replace(
        longer,
        step_seconds=seconds,
        low_seconds=known.low_seconds * ratio,
        high_seconds=known.high_seconds * ratio,
        mfu=(flops + further * more_flops) / seconds,
        operations=known.operations + further * (longer.operations - known.operations),
    )


def _check_independent(plan: Plan) -> None:
    """Raise CannotEstimate if a rank waits for other ranks or the host, which its own step does not show."""
    if plan.pp > 1:
        raise CannotEstimate("A counted step does not show how long the stages of a pipeline wait for each other.")
    if plan.optimizer_offload != "none" or plan.param_offload != "none":
        raise CannotEstimate("A counted step does not show how long the host takes to update parameters.")


def _tokens_per_gpu(case: Case) -> float:
    """Return the tokens of the step on each GPU."""
    job = case.job
    layout = make_mesh(case.plan, case.cluster.gpus, case.cluster.gpus_per_node)
    return job.seq_len * job.micro_batch * job.grad_accum * layout.data_parallel / layout.ranks


def saying(estimate: Estimate, *sentences: str) -> Estimate:
    """Return the estimate with further sentences about what is modelled."""
    coverage = estimate.coverage
    return replace(estimate, coverage=replace(coverage, modelled=(*coverage.modelled, *sentences)))


def price(case: Case, work: Work | None = None) -> Timing:
    """Return the Timing of a job's step; `work` is the result of `Work.of` for it, if it is known already.

    Raises CannotEstimate if a network, a GPU or a link is not known.
    """
    job, plan = case.job, case.plan
    if job.model.kind != "config":
        raise UnknownNetwork("The time of a factory's network is not known; its memory is.")
    if "nvme" in (plan.activation_offload, plan.optimizer_offload.partition("=")[0], plan.param_offload):
        raise CannotEstimate("How fast this machine's files are is not known, so neither is the step's time.")
    if job.lengths:
        return _price_lengths(case)
    work, code = work or Work.of(case.job, case.plan, case.cluster), software_of(plan.engine)
    network = read_stacks(job)
    if network[0].shape.vocab and len(network) == 1:
        return time_step(network[0].shape, work, case.cluster, code)
    layout = work.axes
    if max(layout.tp, layout.pp, layout.cp, layout.ep) > 1:
        kind = job.model.config["model_type"]
        raise UnknownNetwork(f"The time of a {kind!r} network under tp, pp, cp or ep is not known.")
    timings = [
        time_step(
            stack.shape,
            replace(work, seq_len=stack.seq_len, micro_batch=work.micro_batch * stack.sequences, packing=1),
            case.cluster,
            code,
        )
        for stack in network
    ]
    last = network[-1]
    tokens = last.seq_len * last.sequences * work.micro_batch * work.grad_accum
    names = ", ".join(stack.name for stack in network)
    return sum_stacks(timings, tokens, f"time: of {names}, one after the other; tokens are those of {last.name}")


def _price_lengths(case: Case) -> Timing:
    """Return the Timing of micro-batches with drawn lengths, each padded to its longest."""
    job = case.job
    lengths = [min(int(length), job.seq_len) for length in job.lengths]
    padded = padded_lengths(lengths, job.seq_len, job.micro_batch)
    weights: dict[Timing, float] = {}
    for length, weight in padded.items():
        equal_lengths = replace(job, lengths=(), seq_len=max(1, round(length)))
        priced_length = price(Case(equal_lengths, case.plan, case.cluster))
        weights[priced_length] = weights.get(priced_length, 0.0) + weight
    filled = mean(lengths) / sum(length * weight for length, weight in padded.items())
    average = average_steps(weights, filled)
    sentence = f"time: an average over the drawn lengths; only the {100 * filled:.0f} % without padding are counted"
    return replace(average, assumed=(*average.assumed, sentence))


def as_time(known: Timing) -> dict[str, Any]:
    """Return the `time` of an Estimate's document."""
    return {
        "step_seconds": known.step_seconds,
        "low_seconds": known.low_seconds,
        "high_seconds": known.high_seconds,
        "tokens_per_second_per_gpu": known.tokens_per_second_per_gpu,
        "mfu": known.mfu,
        "bound_by": known.bound_by,
    }
