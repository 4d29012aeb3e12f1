"""Lower bounds of a candidate's memory, and an estimate of what a run usually needs on top.

The bound refuses candidates without a run, so each of its terms is certain: tensors that must be alive together,
without temporaries, workspaces, casts, fragmentation, or anything outside torch's allocator.  The estimate only
decides in which order candidates are run.
"""

from functools import lru_cache
from typing import Final

from tonnage.options import replace_checked
from tonnage.plans import Plan
from tonnage.techniques.activation_offload import SMALL_BYTES
from tonnage.timing.head import IN_SLICES, slice_tokens
from tonnage.timing.memory import STATE_BYTES, kept_bytes, logit_bytes, resting_bytes, used_bytes
from tonnage.timing.shape import Shape
from tonnage.timing.work import Work

_LOGIT_BYTES: Final = 14
"""Bytes for each logit of a slice of the loss: in 16 bits, in fp32, as softmax, and their gradient in either."""

_SUMMED_BYTES: Final = 3
"""Bytes for each of the head's weights whose gradient is summed up slice by slice: between those of 16 bits and fp32.

llama-3-8b, 2,048 tokens, zero2: chunked needs 1.24 GiB more than plain, fused 0.74 GiB more, liger 0.92 GiB less."""

_LIGER_BYTES: Final = 4
"""The same for Liger's kernel, which writes the gradient over the logits."""

_REDUCED_BYTES: Final = 8
"""Bytes for each weight of a layer whose gradient is being reduced: in fp32, for this layer and the one before."""


def bound_memory(shape: Shape, work: Work, *, frees_gradients: bool = False) -> int:
    """Return the bytes that one rank must hold at once: before the optimizer's step, or when backward begins.

    `frees_gradients`: the optimizer runs in backward and frees each gradient after its parameter's update.
    """
    weights, gradients, states = _held_bytes(shape, work)
    if frees_gradients:
        gradients = 0.0
    accumulated = gradients if work.grad_accum > 1 else 0.0  # kept from one micro-batch to the next
    in_backward = weights + states + accumulated + _unsharded_bytes(shape, work) + _activation_bytes(shape, work)
    return int(max(weights + gradients + states, in_backward))


def estimate_extra(shape: Shape, work: Work) -> float:
    """Return the bytes inside torch's allocator that a run usually needs above the bound.

    These are further activations of the layers, a layer that is recomputed or whose backward runs, chunks of logits,
    and the weights and gradients that are not sharded at that moment.
    """
    one_layer = _working_bytes(shape, work)
    logits = logit_bytes(shape, work) + _bytes_of_slices(shape, work)
    in_flight = min(work.axes.pp, work.grad_accum)
    kept = _usually_kept_bytes(shape, work) * shape.layers / work.axes.pp * in_flight
    more = max(kept - _activation_bytes(shape, work), 0.0)
    return one_layer + logits + more + _cast_bytes(shape, work, in_flight) + _gathered_bytes(shape, work)


def _bytes_of_slices(shape: Shape, work: Work) -> float:
    """Return the bytes of one slice of a loss in slices, and of the gradients that it has in forward already."""
    if work.loss == "plain" or not shape.vocab:
        return 0.0
    tokens = slice_tokens(work.loss, work.tokens, work.axes.tp, shape.vocab, shape.hidden)
    each = _LIGER_BYTES if work.loss.startswith("liger") else _LOGIT_BYTES
    logits = tokens * shape.vocab / work.axes.tp * each
    summed = 0.0 if work.lora_rank or tokens == work.tokens else _SUMMED_BYTES * shape.vocab * shape.hidden
    hidden = 2.0 * work.tokens * shape.hidden if work.loss in IN_SLICES else 0.0
    return logits + hidden + summed / work.axes.tp


def _working_bytes(shape: Shape, work: Work) -> float:
    """Return the bytes of a layer that is recomputed, or whose backward runs.

    If its activations come back from the host one by one, only its feed-forward network counts.
    """
    if not work.activation_offload or work.checkpointing != "none":
        return used_bytes(shape, work)
    return 2.0 * work.tokens * (4 if shape.gated else 2) * _inner_width(shape) / work.axes.tp


def _usually_kept_bytes(shape: Shape, work: Work) -> float:
    """Return the bytes that a layer keeps for the backward of one micro-batch.

    Torch's tensor parallelism keeps the gathered inputs of the products: whole sequences on each rank.
    """
    if work.checkpointing == "full" or work.activation_offload:
        return 0.0
    t = work.axes.tp
    gathered = 4.0 * shape.hidden * work.tokens * (1 - 1 / t) if work.sequence_parallel else 0.0
    if work.checkpointing not in ("selective", "alternate"):
        return kept_bytes(shape, work) + gathered
    products = shape.query_width + 2 * shape.key_width + (2 if shape.gated else 1) * _inner_width(shape)
    routed = shape.hidden * (shape.experts_per_token if shape.experts else 0)  # the output of each expert
    kept = 0.5 if work.checkpointing == "alternate" else 1.0
    return 2.0 * work.tokens * ((kept * products + 3 * shape.hidden) / t + routed) + gathered


def _cast_bytes(shape: Shape, work: Work, in_flight: int) -> float:
    """Return the bytes of the 16-bit weights that autocast makes for each micro-batch and backward keeps."""
    if not work.autocast or work.checkpointing == "full" or work.lora_rank:
        return 0.0
    return 2.0 * shape.parameters / (work.axes.pp * work.axes.tp * work.axes.ep) * in_flight


def _gathered_bytes(shape: Shape, work: Work) -> float:
    """Return the bytes of sharded weights and gradients that are whole at the peak.

    These are the weights of two layers, the gradients of one and those being reduced, the embedding and head, and the
    head's gradient; in a pipeline, all weights and gradients of the stage.
    """
    if not work.sharded:
        return 0.0
    each = _gathered_weight_bytes(shape, work)
    if work.axes.pp > 1:
        return (each + work.gradient_bytes) * shape.parameters / (work.axes.pp * work.axes.tp)
    routed = shape.experts * shape.expert_parameters
    layer = shape.expert_layer_parameters - routed + routed / work.axes.ep if routed else shape.dense_layer_parameters
    ends = shape.embedding_parameters * (1 if shape.tied else 2)
    gathered = 2 * each * layer + each * ends if work.gathers_again else 0.0
    return (gathered + (each + _REDUCED_BYTES) * layer + each * shape.embedding_parameters) / work.axes.tp


def _unsharded_bytes(shape: Shape, work: Work) -> float:
    """Return the bytes of weights that stay whole from forward to backward: all of them under zero2."""
    if not work.sharded or work.gathers_again or work.axes.pp > 1:
        return 0.0
    experts = shape.experts * shape.expert_parameters * shape.expert_layers * (1 - 1 / work.axes.ep)
    return (shape.parameters - experts) / work.axes.tp * _gathered_weight_bytes(shape, work)


def _gathered_weight_bytes(shape: Shape, work: Work) -> float:
    """Return the bytes of one gathered weight: in the compute dtype, or in the 4 bits in which it is stored."""
    return min(resting_bytes(shape, work), 2.0)


def _held_bytes(shape: Shape, work: Work) -> tuple[float, float, float]:
    """Return the bytes of weights, gradients and optimizer states on a rank with the average share of the network."""
    layout = work.axes
    parts = layout.pp * layout.tp * (layout.ep if not work.sharded else 1)
    elements = shape.parameters / parts
    weights = (
        0.0 if work.param_offload else elements * resting_bytes(shape, work) / (layout.shards if work.sharded else 1)
    )
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


def bound_host_memory(shape: Shape, work: Work, plan: Plan) -> int:
    """Return the bytes of host memory that one rank must have at once for offloaded states, weights and activations.

    A part of the states (`cpu=0.5`) counts as nothing, as do streamed activations if some are too small to move.
    """
    if all(place == "none" for place in (plan.activation_offload, plan.optimizer_offload, plan.param_offload)):
        return 0
    on_card = replace_checked(work, {"param_offload": False, "optimizer_offload": 0.0, "activation_offload": False})
    weights, _, states = _held_bytes(shape, on_card)
    offloaded = 0.0
    if plan.param_offload == "cpu":
        offloaded += weights + states
    elif plan.optimizer_offload == "cpu":
        offloaded += states
    smallest = 2 * work.tokens * min(shape.hidden, shape.key_width) / work.axes.tp
    if plan.activation_offload == "cpu" or (plan.activation_offload == "cpu-streamed" and smallest >= SMALL_BYTES):
        offloaded += _activation_bytes(shape, on_card)
    return int(offloaded)


def bound_activations(shape: Shape, work: Work) -> float:
    """Return the bytes that the layers of one rank must keep for the backward of one micro-batch."""
    return _activation_bytes(shape, work) / min(work.axes.pp, work.grad_accum)


def estimate_first_rank_extra(shape: Shape, work: Work) -> float:
    """Return the bytes that a pipeline's first rank usually holds and its second does not.

    These are one more micro-batch in flight, and the embedding with its gradient and states.
    """
    elements = shape.embedding_parameters / work.axes.tp
    held = sum(_held_bytes(shape, work)) / (shape.parameters / (work.axes.pp * work.axes.tp)) * elements
    gathered_each = _gathered_weight_bytes(shape, work) + work.gradient_bytes + _REDUCED_BYTES
    gathered = gathered_each * elements if work.sharded else 0.0
    one = max(_usually_kept_bytes(shape, work) * shape.layers / work.axes.pp, bound_activations(shape, work))
    return held + gathered + (one if work.grad_accum >= work.axes.pp else 0.0)


def _activation_bytes(shape: Shape, work: Work) -> float:
    """Return the bytes that the layers of one rank must keep for backward, two for each element.

    A checkpointed layer keeps its input; a selectively checkpointed one also the outputs of its matrix products; any
    other keeps the inputs of its matrix products, queries, keys and values, and both factors of its gate.
    """
    if work.activation_offload or work.dtype not in ("bf16", "fp16", "fp8"):
        return 0.0
    in_flight = min(work.axes.pp, work.grad_accum)
    layers = shape.layers / work.axes.pp * in_flight
    return 2.0 * work.tokens * layers * _kept_width(shape, work.checkpointing, work.axes.tp, work.sequence_parallel)


@lru_cache(maxsize=1024)
def _kept_width(shape: Shape, checkpointing: str, tp: int, sequence_parallel: bool) -> float:
    """Return the elements that a rank keeps for each token and layer."""
    inner = _inner_width(shape)
    hidden, query, key = shape.hidden, shape.query_width, shape.key_width
    if shape.latent_rank:
        query = key = 0  # compressed; what is kept of them has no bound here
    attention = query + 2 * key
    feed_forward = 2 * hidden + (3 if shape.gated else 2) * inner
    if checkpointing == "none":
        whole = attention + query + feed_forward
    elif checkpointing == "selective":
        whole = attention + hidden + inner
    else:
        unknown = ("full", "alternate")  # `alternate` keeps products that depend on their order
        whole = 0 if checkpointing in unknown else feed_forward  # `attention` keeps all but the attention's
    return whole / tp + hidden / (tp if sequence_parallel else 1)


def _inner_width(shape: Shape) -> int:
    """Return the inner width of the smallest feed-forward network that a token passes in a layer."""
    if not shape.experts:
        return shape.intermediate
    routed = shape.experts_per_token * shape.expert_intermediate + shape.shared_intermediate
    return min(shape.intermediate, routed) if shape.dense_layers else routed
