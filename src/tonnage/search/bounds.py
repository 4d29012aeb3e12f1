"""The least memory that a candidate can do with, and what runs usually hold beyond it.

The least is used to refuse candidates without running them, so every term is a lower bound: tensors that must be
alive together, without temporaries, workspaces, casts, fragmentation, or anything outside torch's allocator.  What is
usual only says in what order to run.
"""

from functools import lru_cache
from typing import Final

from tonnage.options import varied
from tonnage.plans import CHUNK_TOKENS, Plan
from tonnage.techniques.activation_offload import SMALL_BYTES
from tonnage.timing.memory import STATE_BYTES, kept_bytes, logit_bytes, used_bytes
from tonnage.timing.shape import Shape
from tonnage.timing.work import Work


def least_bytes(shape: Shape, work: Work, *, gradients_go: bool = False) -> int:
    """Bytes that one rank must hold at once: before the optimizer's step, or when backward begins.

    `gradients_go`: the optimizer runs in backward, and no gradient outlives its parameter's turn.
    """
    weights, gradients, states = _held(shape, work)
    if gradients_go:
        gradients = 0.0
    between = gradients if work.grad_accum > 1 else 0.0  # kept from one micro-batch to the next
    in_backward = weights + states + between + _gathered(shape, work) + _activations(shape, work)
    return int(max(weights + gradients + states, in_backward))


_OF_LOGIT: Final = 12
"""Bytes for each logit of a slice of the loss: in 16 bits, in fp32, as softmax, and their gradient in 16 bits."""

_REDUCED: Final = 8
"""Bytes for each weight of a layer whose gradient is on its way: to be reduced in fp32, for it and the one before."""


def usually_beyond(shape: Shape, work: Work) -> float:
    """Bytes inside torch's allocator that a run is likely to hold beyond the least.

    What layers keep besides; a layer that runs again, or whose backward runs; slices of logits; and of weights and
    gradients what is not divided then.
    """
    one_layer = _at_work(shape, work)
    slice_tokens = min(work.tokens, CHUNK_TOKENS * work.axes.tp) if work.loss in ("chunked", "sliced") else 0
    logits = logit_bytes(shape, work) + slice_tokens * shape.vocab / work.axes.tp * _OF_LOGIT
    in_flight = min(work.axes.pp, work.grad_accum)
    kept = _likely_kept(shape, work) * shape.layers / work.axes.pp * in_flight
    more = max(kept - _activations(shape, work), 0.0)
    return one_layer + logits + more + _copies(shape, work, in_flight) + _whole(shape, work)


def _at_work(shape: Shape, work: Work) -> float:
    """Bytes of a layer that runs again, or whose backward runs.

    Of one whose results wait on the host and come back one by one, its feed-forward network's alone.
    """
    if not work.activation_offload or work.checkpointing != "none":
        return used_bytes(shape, work)
    return 2.0 * work.tokens * (4 if shape.gated else 2) * _inner_width(shape) / work.axes.tp


def _likely_kept(shape: Shape, work: Work) -> float:
    """Bytes that a layer keeps for its backward, of one micro-batch.

    Torch's tensor parallelism keeps the inputs of the products as it gathered them, whole sequences on each rank.
    """
    if work.checkpointing == "full" or work.activation_offload:
        return 0.0
    t = work.axes.tp
    gathered = 4.0 * shape.hidden * work.tokens * (1 - 1 / t) if work.sequence_parallel else 0.0
    if work.checkpointing not in ("selective", "alternate"):
        return kept_bytes(shape, work) + gathered
    products = shape.query_width + 2 * shape.key_width + (2 if shape.gated else 1) * _inner_width(shape)
    routed = shape.hidden * (shape.experts_per_token if shape.experts else 0)  # what comes out of each expert
    kept = 0.5 if work.checkpointing == "alternate" else 1.0
    return 2.0 * work.tokens * ((kept * products + 3 * shape.hidden) / t + routed) + gathered


def _copies(shape: Shape, work: Work, in_flight: int) -> float:
    """Of weights in 16 bits, which autocast makes for each micro-batch and products keep for backward."""
    if not work.autocast or work.checkpointing == "full" or work.lora_rank:
        return 0.0
    return 2.0 * shape.parameters / (work.axes.pp * work.axes.tp * work.axes.ep) * in_flight


def _whole(shape: Shape, work: Work) -> float:
    """Of weights and gradients that are divided at rest: two layers' weights, a layer's gradients with what is being
    reduced, the ends of the network and the gradient of its head; under a pipeline all of its stage's.
    """
    if not work.sharded:
        return 0.0
    each = _gathered_bytes(work)
    if work.axes.pp > 1:
        return (each + work.gradient_bytes) * shape.parameters / (work.axes.pp * work.axes.tp)
    routed = shape.experts * shape.expert_parameters
    layer = shape.expert_layer_parameters - routed + routed / work.axes.ep if routed else shape.dense_layer_parameters
    ends = shape.embedding_parameters * (1 if shape.tied else 2)
    gathered = 2 * each * layer + each * ends if work.gathers_again else 0.0
    return (gathered + (each + _REDUCED) * layer + each * shape.embedding_parameters) / work.axes.tp


def _gathered(shape: Shape, work: Work) -> float:
    """Of weights that stay whole from forward to backward, in the dtype of computation: all of them under zero2."""
    if not work.sharded or work.gathers_again or work.axes.pp > 1:
        return 0.0
    experts = shape.experts * shape.expert_parameters * shape.expert_layers * (1 - 1 / work.axes.ep)
    return (shape.parameters - experts) / work.axes.tp * _gathered_bytes(work)


def _gathered_bytes(work: Work) -> float:
    """Of a weight that was divided, whole: as it is computed with, or in the 4 bits in which it rests."""
    return min(work.resting_bytes, 2.0)


def _held(shape: Shape, work: Work) -> tuple[float, float, float]:
    """Of weights, gradients and optimizer states on the rank with the average share of the network."""
    layout = work.axes
    parts = layout.pp * layout.tp * (layout.ep if not work.sharded else 1)
    elements = shape.parameters / parts
    weights = 0.0 if work.param_offload else elements * work.resting_bytes / (layout.shards if work.sharded else 1)
    if work.lora_rank:
        return weights, 0.0, 0.0
    if work.gradients_whole:
        gradients = elements * float(work.reduced_bytes)
    else:
        gradients = elements * work.gradient_bytes / work.gradient_shards
    state = 4.0 if work.main_weights else float(work.weight_bytes)
    states = state * STATE_BYTES[work.optimizer] + (4.0 if work.main_weights else 0.0)
    if work.optimizer_offload or work.param_offload:
        return weights, gradients if work.gradients_whole else 0.0, 0.0
    return weights, gradients, elements * states / work.state_shards


def least_host_bytes(shape: Shape, work: Work, plan: Plan) -> int:
    """Bytes that one rank must have in the host's memory at once: states, weights and activations that wait there.

    Of part of the states (`cpu=0.5`) nothing is counted, nor of streamed activations where some are too small to go.
    """
    if all(place == "none" for place in (plan.activation_offload, plan.optimizer_offload, plan.param_offload)):
        return 0
    kept = varied(work, {"param_offload": False, "optimizer_offload": 0.0, "activation_offload": False})
    weights, _, states = _held(shape, kept)
    waiting = 0.0
    if plan.param_offload == "cpu":
        waiting += weights + states
    elif plan.optimizer_offload == "cpu":
        waiting += states
    smallest = 2 * work.tokens * min(shape.hidden, shape.key_width) / work.axes.tp
    if plan.activation_offload == "cpu" or (plan.activation_offload == "cpu-streamed" and smallest >= SMALL_BYTES):
        waiting += _activations(shape, kept)
    return int(waiting)


def under_way(shape: Shape, work: Work) -> float:
    """Bytes kept for the backward of one micro-batch by the layers of one rank."""
    return _activations(shape, work) / min(work.axes.pp, work.grad_accum)


def usually_of_the_first(shape: Shape, work: Work) -> float:
    """Bytes that a pipeline's first rank usually holds and its second does not.

    One micro-batch more is under way there, and it has the embedding with its gradient and states.
    """
    elements = shape.embedding_parameters / work.axes.tp
    held = sum(_held(shape, work)) / (shape.parameters / (work.axes.pp * work.axes.tp)) * elements
    whole = (_gathered_bytes(work) + work.gradient_bytes + _REDUCED) * elements if work.sharded else 0.0
    one = max(_likely_kept(shape, work) * shape.layers / work.axes.pp, under_way(shape, work))
    return held + whole + (one if work.grad_accum >= work.axes.pp else 0.0)


def _activations(shape: Shape, work: Work) -> float:
    """Kept for backward by the layers of one rank, in two bytes an element.

    A checkpointed layer keeps its input; one checkpointed op by op also what its matrix products gave; any other
    keeps the inputs of its matrix products, queries, keys and values, and both factors of its gate.
    """
    if work.activation_offload or work.dtype not in ("bf16", "fp16", "fp8"):
        return 0.0
    in_flight = min(work.axes.pp, work.grad_accum)
    layers = shape.layers / work.axes.pp * in_flight
    return 2.0 * work.tokens * layers * _kept_width(shape, work.checkpointing, work.axes.tp, work.sequence_parallel)


@lru_cache(maxsize=1024)
def _kept_width(shape: Shape, checkpointing: str, tp: int, sequence_parallel: bool) -> float:
    """Elements that a rank keeps of each token and layer."""
    inner = _inner_width(shape)
    hidden, query, key = shape.hidden, shape.query_width, shape.key_width
    if shape.latent_rank:
        query = key = 0  # compressed: what is kept is not bounded here
    beside = query + 2 * key
    fed = 2 * hidden + (3 if shape.gated else 2) * inner
    if checkpointing == "none":
        whole = beside + query + fed
    elif checkpointing == "selective":
        whole = beside + hidden + inner
    else:
        nothing_sure = ("full", "alternate")  # of the latter, which of its products are kept hangs on their order
        whole = 0 if checkpointing in nothing_sure else fed  # `attention`: all but what attention keeps
    return whole / tp + hidden / (tp if sequence_parallel else 1)


def _inner_width(shape: Shape) -> int:
    """Inner width of the feed-forward network that a token goes through, in a layer with the least of it."""
    if not shape.experts:
        return shape.intermediate
    routed = shape.experts_per_token * shape.expert_intermediate + shape.shared_intermediate
    return min(shape.intermediate, routed) if shape.dense_layers else routed
