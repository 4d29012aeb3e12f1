"""Exchanges inside a micro-batch: tensor, sequence and context parallelism, and tokens handed to experts.

Those of weights and gradients between data-parallel ranks are in `data_parallel`, those between the stages of a
pipeline in `pipeline`; `collectives` gives the seconds of a single exchange.
"""

from tonnage.cluster import Cluster
from tonnage.timing import schedule
from tonnage.timing.collectives import Fabric, Group
from tonnage.timing.fabrics import place_group
from tonnage.timing.head import count_slices
from tonnage.timing.operations import ELEMENT_BYTES, kept_dtype
from tonnage.timing.shape import Shape
from tonnage.timing.software import Software
from tonnage.timing.work import Work

EMBEDDING_CALLS = 2
"""Rings of the embedding: a scatter, and its gradient's gather."""

HEAD_CALLS = 3
"""Rings of the head: a gather, in backward the same again and a scatter."""


def layer_exchange(
    shape: Shape, work: Work, cluster: Cluster, fabric: Fabric, software: Software
) -> tuple[float, float]:
    """Return the exposed seconds and the latencies of a layer's exchanges for one micro-batch.

    Tensor parallelism: two gathers and two scatters in forward, as many in backward and two gathers of the inputs
    again; without sequence parallelism two all-reduces each.  A recomputed layer repeats its forward's.

    Experts: tokens there and back in both passes; an all-to-all gathers counts first, which the host waits for, and
    sends the router's weights apart.
    """
    axes = work.axes
    again = 4 * work.checkpointed_fraction if work.checkpointing == "full" else 0
    calls = (10 if work.sequence_parallel else 8) + again
    exchange, waits = tensor_exchange(shape, work, cluster, fabric, software, calls)
    activations = _activation_bytes(shape, work)
    if axes.cp > 1:
        group = place_group(axes.cp, axes.tp, cluster)
        keys = activations / shape.hidden * 2 * shape.key_width / axes.tp
        passing = 3 * (group.ranks - 1) * fabric.send(keys, group.far)
        exchange += passing * software.tensor_exposed
    if axes.ep > 1 and shape.experts:
        group = place_group(axes.ep, 1 if work.experts_whole else axes.tp, cluster)
        counting = 3 * fabric.call_seconds + fabric.hops(group)
        waits += 4 * fabric.call_seconds + (0.0 if work.experts_once else counting)
    return exchange, waits


def tensor_exchange(
    shape: Shape, work: Work, cluster: Cluster, fabric: Fabric, software: Software, calls: float, small: float = 0
) -> tuple[float, float]:
    """Return the seconds on the card, and the waits of the host, of gathers and scatters among tensor-parallel ranks.

    `calls`: exchanges of the whole residual stream; `small`: exchanges of a few numbers a token.
    """
    if work.axes.tp == 1:
        return 0.0, 0.0
    group = Group(work.axes.tp, min(work.axes.tp, cluster.gpus_per_node))
    exposed = software.tensor_exposed if work.tensor_beside else 1.0
    moving = calls * fabric.moving(group, _activation_bytes(shape, work)) * exposed
    if is_piped(work, cluster):
        return moving, (calls + small) * fabric.latency(group)
    return moving + (calls + small) * fabric.hops(group), (calls + small) * fabric.call_seconds


def count_loss_calls(work: Work) -> int:
    """Return the all-reduces of a loss that is divided by words.

    Three (Shoeybi et al. 2019, arXiv:1909.08053, section 3) each way; in slices (techniques/vocabulary.py) two, and
    the same again in backward, for each slice.
    """
    if work.loss != "chunked":
        return 6
    return 4 * count_slices(work.tokens, work.axes.tp)


def is_piped(work: Work, cluster: Cluster) -> bool:
    """Return True if a pipeline spans machines."""
    return work.axes.pp > 1 and cluster.nodes > 1


def expert_exchange(
    shape: Shape, work: Work, cluster: Cluster, fabric: Fabric, software: Software, computing: float
) -> float:
    """Return the exposed seconds of a layer's exchanges with experts, there and back in each pass.

    Overlapped, they go on while another micro-batch computes, which takes as long: `computing` seconds.
    """
    inner = 1 if work.experts_whole else work.axes.tp
    group = place_group(work.axes.ep, inner, cluster)
    again = 2 * work.checkpointed_fraction if work.checkpointing in ("full", "experts") else 0
    handing = (4 + again) * _dispatch_seconds(shape, work, fabric, group)
    if work.experts_overlapped:
        return schedule.exposed_seconds(handing, computing, software.expert_overlap)
    return handing


def _dispatch_seconds(shape: Shape, work: Work, fabric: Fabric, group: Group) -> float:
    """Return the seconds of handing each token to its experts, averaged over all layers.

    A tensor-parallel rank hands on its part of the tokens.  An all-to-all sends a token for each of its k experts, of
    which a part of (n - 1)/n are on another of n ranks or machines; others send it to each of those once: to
    (n - 1)(1 - (1 - 1/n)^k).
    """
    tokens = _activation_bytes(shape, work) / work.axes.tp * shape.expert_layers / shape.layers

    def copies(places: float) -> float:
        if work.experts_once:
            return (places - 1) * (1 - (1 - 1 / places) ** shape.experts_per_token)
        return shape.experts_per_token * (places - 1) / places

    near = tokens * copies(group.ranks) / fabric.near_bytes_per_second
    if not group.far or fabric.far_bytes_per_second is None:
        return near
    return max(near, tokens * copies(group.nodes) / fabric.far_bytes_per_second)


def _activation_bytes(shape: Shape, work: Work) -> float:
    """Return the bytes of the residual stream of one micro-batch, whole."""
    return work.tokens * shape.hidden * ELEMENT_BYTES[kept_dtype(work.dtype)]
