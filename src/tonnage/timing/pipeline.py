"""Stages of a pipeline: which layers each has, how long it takes, and what stages hand over.

Without pipeline parallelism there is one stage with all layers.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tonnage.cluster import Cluster
from tonnage.timing import schedule
from tonnage.timing.collectives import Fabric
from tonnage.timing.keys import cached_by, layer_key
from tonnage.timing.micro_batch import PassSeconds, network_seconds
from tonnage.timing.operations import ELEMENT_BYTES, kept_dtype
from tonnage.timing.rates import Card, Seconds
from tonnage.timing.shape import Shape
from tonnage.timing.software import Software
from tonnage.timing.work import Work


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of the stages of a pipeline for one micro-batch; from `slowest` on, those of the slowest stage."""

    seconds: tuple[float, ...]
    """Seconds of each stage."""
    layer: float
    """Seconds of an average layer."""
    slowest: float
    """Seconds of the slowest stage."""
    card: float
    """Seconds of the card, without what runs again."""
    again: float
    """Seconds of the card for what runs again."""
    computing: float
    """Seconds of products and attention, also of those that run again."""
    passing: float
    """Seconds of passes over memory, also of those that run again."""
    exchange: float
    """Seconds of traffic that nothing hides."""
    host: float
    """Seconds of the host."""


@cached_by(layer_key)
def stage_seconds(
    shape: Shape,
    work: Work,
    cluster: Cluster,
    card: Card,
    software: Software,
    split: schedule.Split,
    gathering: float,
) -> StageSeconds:
    """Return the seconds of the stages; `gathering`: seconds that the host waits besides in each layer."""
    layer, embedding, head = network_seconds(shape, work, cluster, card, software)
    layer = layer.with_waits(gathering)
    ends = _place_ends(split, embedding, head)
    layer_seconds = layer.seconds(software)
    stages = [count * layer_seconds for count in split.layers]
    for stage, end in ends:
        stages[stage] += end.seconds(software)
    slowest = stages.index(max(stages))
    whole = _sum_stage(split.layers[slowest], layer, [end for stage, end in ends if stage == slowest])
    return StageSeconds(
        seconds=tuple(stages),
        layer=layer_seconds,
        slowest=max(stages),
        card=whole.card.total,
        again=whole.again.total,
        computing=whole.card.computing + whole.again.computing,
        passing=whole.card.passing + whole.again.passing,
        exchange=whole.exchange,
        host=whole.host_seconds(software),
    )


def _sum_stage(layers: int, layer: PassSeconds, ends: Iterable[PassSeconds]) -> PassSeconds:
    """Return the sum of all that one stage computes: so many layers, and its ends of the network."""
    card, again = layer.card * layers, layer.again * layers
    exchange, waits = layer.exchange * layers, layer.waits * layers
    for end in ends:
        card, again = card + end.card, again + end.again
        exchange, waits = exchange + end.exchange, waits + end.waits
    return PassSeconds(card, again, layer.repeats * layers, exchange, waits, layer.calls * layers)


def _place_ends(
    split: schedule.Split, embedding: PassSeconds, head: PassSeconds
) -> tuple[tuple[int, PassSeconds], ...]:
    """Return the parts that stages have besides layers, each with its stage: embedding, head's product and loss."""
    if split.head == split.loss:
        return (0, embedding), (split.head, head)
    card, kernels = head.card, head.card.kernels / 2
    product = Seconds(compute=card.compute, kernels=kernels)
    loss = Seconds(memory=card.memory, kernels=kernels)
    return (
        (0, embedding),
        (split.head, PassSeconds(product, Seconds(), 0.0, head.exchange, head.waits)),
        (split.loss, PassSeconds(loss, Seconds(), 0.0, 0.0, 0.0)),
    )


def split_network(shape: Shape, work: Work, software: Software) -> schedule.Split:
    """Return which layers and ends of the network are on which stage."""
    if work.stage_layers:
        return schedule.Split(work.stage_layers, work.axes.pp - 1, work.axes.pp - 1)
    if not software.balanced:
        return schedule.split_equally(shape.layers, work.axes.pp)
    head_layers = shape.embedding_parameters / (shape.dense_layer_parameters - shape.norm_parameters)
    return schedule.split_by_cost(shape.layers, work.axes.pp, head_layers)


def send_seconds(shape: Shape, work: Work, cluster: Cluster, fabric: Fabric, software: Software) -> float:
    """Return the seconds of handing activations on and gradients back, for one micro-batch."""
    axes = work.axes
    if axes.pp == 1:
        return 0.0
    divided = axes.tp if work.sequence_parallel else 1
    handed = work.tokens * shape.hidden * ELEMENT_BYTES[kept_dtype(work.dtype)] / divided
    far = axes.ranks // axes.pp >= cluster.gpus_per_node and cluster.nodes > 1
    return 2 * work.virtual_stages * fabric.send(handed, far) * software.sends_exposed


def stall_seconds(work: Work, software: Software) -> float:
    """Return the seconds of a step for which hand-overs in pipelines of many ranks were seen to stall.

    A stage receives and sends in both directions, four hand-overs for each micro-batch (at the ends two), and the
    first micro-batch passes the other stages before.
    """
    axes = work.axes
    many = software.crowded_ranks and axes.ranks >= software.crowded_ranks
    wide = software.crowded_tensor_ranks and axes.tp >= software.crowded_tensor_ranks
    if axes.pp == 1 or not (many or wide):
        return 0.0
    handed = 2 * min(axes.pp - 1, 2) * work.virtual_stages * work.grad_accum + axes.pp - 1
    return handed * software.handing_seconds
