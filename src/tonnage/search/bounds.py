"""The least memory that a candidate can do with: what no run of it can avoid holding at once.

Used to refuse candidates without running them, so every term is a lower bound: tensors that must be alive together,
without temporaries, workspaces, casts, fragmentation, or anything outside torch's allocator.
"""

from tonnage.costs.memory import STATE_BYTES
from tonnage.costs.shape import Shape
from tonnage.costs.work import Work


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


def _gathered(shape: Shape, work: Work) -> float:
    """Of weights that stay whole from forward to backward, in the dtype of computation: all of them under zero2."""
    if not work.sharded or work.gathers_again or work.axes.pp > 1:
        return 0.0
    experts = shape.experts * shape.expert_parameters * shape.expert_layers * (1 - 1 / work.axes.ep)
    return (shape.parameters - experts) / work.axes.tp * min(work.weight_bytes, 2)


def _held(shape: Shape, work: Work) -> tuple[float, float, float]:
    """Of weights, gradients and optimizer states on the rank with the average share of the network."""
    layout = work.axes
    parts = layout.pp * layout.tp * (layout.ep if not work.sharded else 1)
    elements = shape.parameters / parts
    weight_bytes = 0.5 if work.quantized else float(work.weight_bytes)
    shards = layout.shards if work.sharded else 1
    weights = elements * weight_bytes / shards
    if work.param_offload:
        weights = 0.0
    if work.lora_rank:
        return weights, 0.0, 0.0
    whole = work.sharded and work.grad_accum > 1 and not work.averages_each and work.axes.pp == 1
    gradients = elements * work.gradient_bytes / (1 if whole else shards)
    spread = shards if work.shard != "zero1" else layout.dp_replicate
    states = elements * STATE_BYTES.get(work.optimizer, 0.0) * work.weight_bytes / spread
    if work.optimizer_offload or work.param_offload:
        gradients = states = 0.0
    return weights, gradients, states


def _activations(shape: Shape, work: Work) -> float:
    """Kept for backward by the layers of one rank, in two bytes an element.

    A checkpointed layer keeps its input; one checkpointed op by op also what its matrix products gave; any other
    keeps the inputs of its matrix products, queries, keys and values, and both factors of its gate.
    """
    if work.activation_offload or work.dtype not in ("bf16", "fp16", "fp8"):
        return 0.0
    in_flight = min(work.axes.pp, work.grad_accum)
    layers = shape.layers / work.axes.pp * in_flight
    inner = _inner_width(shape)
    hidden, query, key = shape.hidden, shape.query_width, shape.key_width
    if shape.latent_rank:
        query = key = 0  # compressed: what is kept is not bounded here
    whole = {
        "none": query + 2 * key + query + 2 * hidden + (3 if shape.gated else 2) * inner,
        "attention": 2 * hidden + (3 if shape.gated else 2) * inner,
        "selective": query + 2 * key + hidden + inner,
        "full": 0,
    }[work.checkpointing]
    divided = whole / work.axes.tp + hidden / (work.axes.tp if work.sequence_parallel else 1)
    return 2.0 * work.tokens * layers * divided


def _inner_width(shape: Shape) -> int:
    """Inner width of the feed-forward network that a token goes through, in a layer with the least of it."""
    if not shape.experts:
        return shape.intermediate
    routed = shape.experts_per_token * shape.expert_intermediate + shape.shared_intermediate
    return min(shape.intermediate, routed) if shape.dense_layers else routed
