"""Exchanges of weights and gradients among data-parallel ranks: sharding, averaging, and the host's part in FSDP2."""

from dataclasses import dataclass
from math import log2
from typing import Final

from tonnage.cluster import Cluster
from tonnage.timing import rates
from tonnage.timing.collectives import Fabric, Group
from tonnage.timing.fabrics import place_group
from tonnage.timing.layer import layer_weights
from tonnage.timing.operations import ELEMENT_BYTES, Slice, kept_dtype
from tonnage.timing.rates import Card
from tonnage.timing.shape import Shape
from tonnage.timing.software import Software
from tonnage.timing.weights import count_modules, count_tensors, expert_weights, trained_weights
from tonnage.timing.work import Work

GATHERED_TENSOR_SECONDS: Final = 75e-6
"""Seconds of the host under FSDP2, for each tensor of weights each time it is gathered: Llama 3.2 1B on an H200 with
adapters (368 tensors in layers, 224 of them trained) took 0.177 s a step for 0.094 without FSDP2, and whole 0.125 for
0.123 (measurements/h200-2026-11-26b.jsonl).  `optimizer.UPDATED_TENSOR_SECONDS` is from the same steps."""

_GATHERED_4BIT_SECONDS: Final = 500e-6
"""The same for a tensor that bitsandbytes quantized: the excess of one step over all else (QLoRA of Llama 3.2 1B on
an H200, measurements/h200-2026-11-26b.jsonl)."""


def gathering_host_seconds(shape: Shape, work: Work) -> float:
    """Return the seconds of the host for a layer of a micro-batch, whose tensors FSDP2 gathers one by one."""
    if not work.unpacked:
        return 0.0
    each = count_tensors(shape, work) * GATHERED_TENSOR_SECONDS
    each += count_modules(shape) * _GATHERED_4BIT_SECONDS * work.quantized
    return each * (2 if work.gathers_again else 1)


def unpacking_seconds(work: Work, cluster: Cluster, card: Card, weights: float) -> float:
    """Return the seconds of copying gathered weights out of their buffer, for an average micro-batch.

    Read and write, on the stream that computes.  The copies into buffers that FSDP2 makes are on other streams,
    beside layers: 8 billion weights on one H100 take 25 ms more for it all, of which this is 22.
    """
    if not work.unpacked:
        return 0.0
    element = 0.5 if work.quantized else ELEMENT_BYTES[kept_dtype(work.dtype)]
    gathers = 2 if work.gathers_again else 1
    return weights * gathers * 2 * element / (rates.bandwidth(cluster.device) * card.memory)


@dataclass(frozen=True, slots=True)
class LayerExchange:
    """Exchanges of a layer's weights beside computation."""

    lasting: float
    """Seconds that they last."""
    slowing: float
    """Seconds by which they slow the computation down."""

    def exposed(self, hiding: float) -> float:
        """Return the seconds that so many of computation do not hide."""
        return max(self.lasting - hiding, self.slowing)


@dataclass(frozen=True, slots=True)
class Gathering:
    """Gathering sharded weights and scattering their gradients: the part that depends on layout and network alone.

    Ranks that keep whole gradients scatter those of a step's last micro-batch alone; torch's pipeline also keeps the
    weights that it gathered for the first.
    """

    layers: float
    """Layers of one stage, on average."""
    forward: LayerExchange
    """Exchanges of a layer's forward pass."""
    backward: LayerExchange
    """Exchanges of its backward pass."""
    unscattered: LayerExchange
    """Exchanges of a backward pass in which gradients are not scattered."""
    ends_gathered: float
    """Seconds of gathering embedding and head."""
    ends_scattered: float
    """Seconds of scattering their gradients."""

    def seconds(self, work: Work, layer_seconds: float) -> float:
        """Return the exposed seconds of an average micro-batch; `layer_seconds`: those of a layer's passes."""
        gathering = self.layers * self.forward.exposed(layer_seconds / 3) + self.ends_gathered
        scattering = self.layers * self.backward.exposed(layer_seconds * 2 / 3) + self.ends_scattered
        unscattered = self.layers * self.unscattered.exposed(layer_seconds * 2 / 3)
        once = 1 / work.grad_accum
        gathers = once if work.axes.pp > 1 else 1.0
        scatters = once if work.axes.pp > 1 or work.gradients_whole else 1.0
        return gathers * gathering + scatters * scattering + (1 - scatters) * unscattered


def plan_gathering(shape: Shape, work: Work, cluster: Cluster, fabric: Fabric) -> Gathering | None:
    """Return the exchanges of sharded weights; None where no weights are sharded among ranks."""
    if not work.sharded or work.axes.shards == 1:
        return None
    group = place_group(work.axes.shards, work.axes.tp, cluster)
    part = Slice(
        tokens=1,
        seq_len=1,
        tp=work.axes.tp,
        ep=work.axes.ep,
        experts=bool(shape.experts),
        experts_whole=work.experts_whole,
    )
    weights = layer_weights(shape, part)
    element = ELEMENT_BYTES[kept_dtype(work.dtype)]
    again = [weights * element] if work.gathers_again else []
    scattered = [] if work.lora_rank else [weights * work.reduced_bytes]

    def exchange(moved: list[float]) -> LayerExchange:
        lasting = sum(fabric.gather(group, one) for one in moved)
        return LayerExchange(lasting, sum(fabric.slowing(group, one) for one in moved))

    ends = shape.embedding_parameters * (1 if shape.tied else 2) / work.axes.tp
    return Gathering(
        layers=shape.layers / work.axes.pp,
        forward=exchange([weights * element]),
        backward=exchange(scattered + again),
        unscattered=exchange(again),
        ends_gathered=fabric.gather(group, ends * element),
        ends_scattered=fabric.gather(group, ends * work.reduced_bytes) / 2,
    )


@dataclass(frozen=True, slots=True)
class Averaging:
    """Averaging gradients over data-parallel ranks: the part that depends on layout and network alone."""

    layers: int
    """Layers of the network."""
    moving: float
    """Seconds of moving a step's gradients once."""
    slowing: float
    """Seconds by which that slows computation down."""

    def seconds(self, work: Work, software: Software, backward: float) -> float:
        """Return the seconds of a step that are exposed, where the last backward pass takes `backward` seconds."""
        moving = self.moving
        if work.sharded:  # layer by layer, behind the layers before it
            lasting = max(moving - backward, 2 * self.slowing) + moving / self.layers
        elif work.weights_stay:  # gradients go after each micro-batch, weights come after the update
            going = moving / 2
            return work.grad_accum * (going - software.data_overlap * min(going, backward)) + going
        else:
            lasting = moving - software.data_overlap * min(moving, backward)
        return lasting * (work.grad_accum if work.averages_each else 1)


def plan_averaging(
    shape: Shape, work: Work, cluster: Cluster, fabric: Fabric, software: Software, weights: float
) -> Averaging | None:
    """Return the averaging of gradients; None where no ranks have the same weights, or nobody averages."""
    axes = work.axes
    trained = trained_weights(shape, work, weights)
    ranks = axes.dp_replicate * (1 if work.sharded else axes.dp_shard)
    if ranks == 1 or work.shard == "none":
        return None
    inner = axes.tp * axes.cp * (axes.dp_shard if work.sharded else 1)
    group = place_group(ranks, inner, cluster)
    kept = trained / (axes.shards if work.sharded else 1)
    averaged = kept * work.gradient_bytes
    apart = 0.0 if work.sharded or work.lora_rank else expert_weights(shape, work) * work.gradient_bytes
    expert_group = _group_of_same_experts(work, ranks, cluster)
    moving = 2 * fabric.moving(group, averaged - apart) + 2 * fabric.moving(expert_group, apart)
    if group.far and software.bucket_seconds:
        doublings = max(group.nodes, 1.0)
        moving += averaged / software.bucket_bytes * software.bucket_seconds * log2(doublings)
    if group.far and work.shard == "zero1":
        moving += shape.layers / axes.pp * software.update_seconds * log2(cluster.nodes)
    if software.crowded_ranks and axes.ranks >= software.crowded_ranks and axes.pp == 1:
        moving += software.crowded_seconds * (1 if work.shard == "zero1" else 2)
    return Averaging(shape.layers, moving, fabric.slowing(group, averaged))


def _group_of_same_experts(work: Work, ranks: int, cluster: Cluster) -> Group:
    """Return the group of those among so many data-parallel ranks that have the same experts.

    Each is as many places from the next as experts are divided over, so few of them or one share a machine.
    """
    axes = work.axes
    inner = axes.ep * (1 if work.experts_whole else axes.tp)
    return place_group(max(ranks * axes.cp * axes.tp // inner, 1), inner, cluster)
