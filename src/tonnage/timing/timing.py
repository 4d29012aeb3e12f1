"""Seconds of a training step, from the dimensions of its network, what each rank does, and the cluster.

    time_step(shape, work, cluster, software).step_seconds

A step is the passes of its micro-batches through the stages of a pipeline (`pipeline`, `micro_batch`), the exchanges
that computation does not hide (`micro_batch_exchanges`, `data_parallel`), the optimizer (`optimizer`, `host`), and
copies to and from the host.  `docs/reference/time.md` says how each constant was obtained.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

from tonnage.cluster import Cluster
from tonnage.timing import host, rates, schedule
from tonnage.timing.collectives import Fabric
from tonnage.timing.data_parallel import (
    Averaging,
    Gathering,
    gathering_host_seconds,
    plan_averaging,
    plan_gathering,
    unpacking_seconds,
)
from tonnage.timing.fabrics import data_fabric
from tonnage.timing.interval import WAITING, estimate_interval, host_assumption
from tonnage.timing.keys import cached_by, weight_key
from tonnage.timing.optimizer import Update, plan_update
from tonnage.timing.pipeline import send_seconds, split_network, stage_seconds, stall_seconds
from tonnage.timing.rates import Card
from tonnage.timing.shape import Shape
from tonnage.timing.software import Software
from tonnage.timing.weights import rank_weights, trained_weights
from tonnage.timing.work import Work


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The seconds of one optimizer step, in parts that sum to `step_seconds`."""

    step_seconds: float
    """Seconds from the beginning of a step to the beginning of the next."""
    low_seconds: float
    """Lower end of the interval: 8 of 10 rows that calibration did not see were within it."""
    high_seconds: float
    """Upper end of the interval."""
    compute_seconds: float
    """Forward and backward passes of the slowest stage, less what runs again."""
    recompute_seconds: float
    """Forward passes that run again in backward."""
    communication_seconds: float
    """Exchanges that computation does not hide."""
    bubble_seconds: float
    """Waiting for other stages of the pipeline."""
    optimizer_seconds: float
    """The optimizer's step, with the norm of gradients."""
    copy_seconds: float
    """Copies to and from the host that computation does not hide."""
    host_seconds: float
    """Waiting for the host, which launches kernels more slowly than the card runs them."""
    tokens_per_second_per_gpu: float
    """Tokens of the step / seconds / GPUs."""
    mfu: float
    """Model FLOPs utilization: (6 P + 12 L H s) x tokens / seconds / GPUs / dense peak of the dtype of matrix
    products; P active weights (4 instead of 6 for frozen ones), H width of the queries, s tokens of a sequence, no
    allowance for the mask."""
    bound_by: str
    """The longest part of the step: `compute`, `memory`, `communication` or `host`."""
    assumed: tuple[str, ...] = ()
    """Sentences about what could not be known."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs that are the same in all steps that divide, exchange and update weights alike."""

    fabric: Fabric
    """Links among data-parallel ranks."""
    gathering: Gathering | None
    """Exchanges of sharded weights and their gradients; None: there are none."""
    averaging: Averaging | None
    """Exchanges of gradients among ranks with the same weights; None: there are none."""
    weights: float
    """Weights of one rank before data parallelism divides them."""
    trained: float
    """Trained ones of these weights."""
    unpacking: float
    """Seconds of copying gathered weights out of their buffer, for an average micro-batch."""
    update: Update
    """The optimizer's step on the card."""
    host_update: float
    """Seconds of the optimizer's step on the host."""
    token_flops: float
    """Operations for each token of a step, by the usual count."""
    interval: tuple[float, float, tuple[str, ...]]
    """Factors of the interval's ends, and what is assumed."""
    waiting_interval: tuple[float, float, tuple[str, ...]]
    """The same for steps in which the card waits for the host."""


@cached_by(weight_key)
def step_costs(shape: Shape, work: Work, cluster: Cluster, card: Card, software: Software) -> StepCosts:
    """Return the costs of a step that do not depend on its batch."""
    fabric = data_fabric(cluster, card, software)
    weights = rank_weights(shape, work)
    trained = trained_weights(shape, work, weights)
    return StepCosts(
        fabric=fabric,
        gathering=plan_gathering(shape, work, cluster, fabric),
        averaging=plan_averaging(shape, work, cluster, fabric, software, weights),
        weights=weights,
        trained=trained,
        unpacking=unpacking_seconds(work, cluster, card, weights),
        update=plan_update(shape, work, cluster, card, trained),
        host_update=host.update_seconds(trained / work.state_shards, work, cluster),
        token_flops=_token_flops(shape, work),
        interval=estimate_interval(shape, work, cluster, card, software, waits=False),
        waiting_interval=estimate_interval(shape, work, cluster, card, software, waits=True),
    )


def time_step(shape: Shape, work: Work, cluster: Cluster, software: Software) -> Timing:
    """Return the seconds of a step.  Raise CannotEstimate where a rate that matters is not known."""
    card = rates.card(cluster.device)
    tokens = work.step_tokens
    if work.gradients_twice:
        work = replace(work, grad_accum=2 * work.grad_accum, averages_each=True)
    split, gathering_host = split_network(shape, work, software), gathering_host_seconds(shape, work)
    stages = stage_seconds(shape, work, cluster, card, software, split, gathering_host)
    costs = step_costs(shape, work, cluster, card, software)
    m, unpacking = work.grad_accum, costs.unpacking
    sends = send_seconds(shape, work, cluster, costs.fabric, software)
    gathers = 0.0 if costs.gathering is None else costs.gathering.seconds(work, stages.layer)
    per_micro_batch = sends + gathers + software.micro_batch_seconds
    busy = schedule.pipeline_seconds(
        tuple([seconds + per_micro_batch + unpacking for seconds in stages.seconds]), m, work.virtual_stages
    )
    stalls = stall_seconds(work, software)
    averaging = 0.0 if costs.averaging is None else costs.averaging.seconds(work, software, stages.card * 2 / 3)
    ahead = m * max(stages.slowest - stages.host, 0.0)
    card_update = costs.update.seconds(ahead)
    update = card_update + costs.host_update
    copies = host.copy_seconds(shape, work, cluster, costs.weights, costs.trained, stages.slowest)
    step = busy + stalls + averaging + update + copies
    exchanged = m * (stages.exchange + per_micro_batch) + stalls + averaging
    bubble = busy - m * (stages.slowest + per_micro_batch + unpacking)
    compute = m * (stages.card + unpacking)
    repeated = compute / 2 if work.gradients_twice else 0.0
    compute -= repeated
    recompute = m * stages.again + repeated
    known = compute + recompute + exchanged + bubble + update + copies
    waiting = max(step - known, 0.0)
    bounds = {
        "compute": m * stages.computing,
        "memory": m * (stages.passing + unpacking) + card_update,
        "communication": exchanged + copies,
        "host": waiting + costs.host_update,
    }
    peak = rates.peak_flops(cluster.device, work.dtype)
    gpus = work.axes.ranks
    part_waiting = waiting / step
    low, high, assumed = costs.waiting_interval if part_waiting > WAITING else costs.interval
    if part_waiting > WAITING:
        assumed = (host_assumption(part_waiting), *assumed)
    return Timing(
        step_seconds=step,
        low_seconds=step * low,
        high_seconds=step * high,
        compute_seconds=compute,
        recompute_seconds=recompute,
        communication_seconds=exchanged,
        bubble_seconds=bubble,
        optimizer_seconds=update,
        copy_seconds=copies,
        host_seconds=waiting,
        tokens_per_second_per_gpu=tokens / step / gpus,
        mfu=costs.token_flops * tokens / step / gpus / peak,
        bound_by=max(bounds, key=lambda name: bounds[name]),
        assumed=assumed,
    )


_SUMMED: Final = tuple(item.name for item in fields(Timing) if item.name.endswith("_seconds"))

STACKED: Final = (0.7, 1.7)
"""Measured / predicted of the six steps of ViT-large and T5-base on our H200: the least and the most."""


def sum_stacks(stacks: Sequence[Timing], tokens: float, assumed: str) -> Timing:
    """Return the Timing of stacks of layers that a step runs one after the other, none hiding another's exchanges.

    `tokens`: tokens of the step on each rank, by which its speed is given.
    """
    seconds = {name: sum(getattr(one, name) for one in stacks) for name in _SUMMED}
    step = seconds["step_seconds"]
    low, high = STACKED
    ends = {"low_seconds": min(seconds["low_seconds"], step * low)}
    ends["high_seconds"] = max(seconds["high_seconds"], step * high)
    longest = max(stacks, key=lambda one: one.step_seconds)
    return replace(
        longest,
        **(seconds | ends),
        tokens_per_second_per_gpu=tokens / step,
        mfu=sum(one.mfu * one.step_seconds for one in stacks) / step,
        assumed=(*longest.assumed, assumed),
    )


def model_flops(shape: Shape, work: Work) -> float:
    """Return the operations of a step that the network needs by the usual count; see Timing.mfu."""
    return _token_flops(shape, work) * work.step_tokens


def _token_flops(shape: Shape, work: Work) -> float:
    """Return the operations of one token by the usual count: 6 P + 12 L H s."""
    weights = (4 if work.lora_rank else 6) * shape.active_parameters
    attention = (8 if work.lora_rank else 12) * shape.layers * shape.query_width * work.seq_len / work.packing
    return weights + attention
