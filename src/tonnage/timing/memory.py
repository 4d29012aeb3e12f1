"""Estimate of a step's memory in closed form, for comparing thousands of layouts, never for an answer.

An answer's memory comes from a run on the ghost.  Letters: timing/shape.py.
"""

from functools import lru_cache
from typing import Final

from tonnage.timing.operations import ELEMENT_BYTES, kept_dtype
from tonnage.timing.schedule import Split, split_equally
from tonnage.timing.shape import Shape
from tonnage.timing.work import Work

STATE_BYTES: Final = {
    **dict.fromkeys(("adamw", "adamw-loop", "adamw-foreach", "adamw-fused"), 2.0),
    **dict.fromkeys(("adamw-8bit", "adamw-8bit-ao", "adamw-fp8-ao"), 0.5),
    **{"adamw-4bit": 0.25, "lion": 1.0, "lion-8bit": 0.25, "muon": 1.0, "sgd": 1.0},
    **dict.fromkeys(("paged-adamw", "paged-adamw-8bit", "adafactor", "sgd-plain"), 0.0),
}
"""Bytes of optimizer states for each byte of an fp32 weight: Adam keeps two numbers, in 8 bits a quarter of that.
Paged ones are in managed memory, which the host may hold; Adafactor's are the means of rows and columns."""


SAVED_AGAIN: Final = 1.5
"""Bytes that a layer's operations save / bytes of what they save: one input of three products is saved three times.

A layer without its weights, on the ghost, of `used_bytes`, under autocast and in bf16: Llama 3.2 3B 1.42 and 1.45,
Qwen3 4B 1.63 and 1.67, GPT-2 large 1.91 and 1.43; tests count small ones on the CPU."""


def state_bytes(shape: Shape, work: Work, layers: int, ends: int, *, main_weights: bool = False) -> float:
    """Return the bytes of weights, gradients and optimizer states of a rank.

    `layers`, `ends`: how many it has of the layers, and of embedding and head.
    `main_weights`: the optimizer has fp32 weights of its own beside stored ones of 16 bits, and its states are fp32.
    zero1 divides states (and main weights), zero2 and beyond everything.
    """
    routed = shape.experts * shape.expert_parameters if shape.experts else 0
    expert_share = shape.expert_layers / shape.layers if shape.experts else 0.0
    plain = (shape.expert_layer_parameters if shape.experts else 0) - routed
    layer = (1 - expert_share) * shape.dense_layer_parameters + expert_share * (plain + routed / work.axes.ep)
    weights = (layers * layer + ends * shape.embedding_parameters) / work.axes.tp
    if work.lora_rank:
        return weights * resting_bytes(shape, work) / _count_shards(work)
    state = 4.0 if main_weights else float(work.weight_bytes)
    optimizer = state * STATE_BYTES[work.optimizer] + (4.0 if main_weights else 0.0)
    if work.optimizer_offload or work.param_offload:
        optimizer = 0.0
    divided = work.axes.data_parallel if work.shard == "zero1" else 1
    stored = 0.0 if work.param_offload else work.weight_bytes + work.gradient_bytes
    return weights * (stored + optimizer / divided) / _count_shards(work)


def resting_bytes(shape: Shape, work: Work) -> float:
    """Return the bytes of a weight while it is not used, on average: those of routed experts are never quantized."""
    if not (work.quantized and shape.experts):
        return work.resting_bytes
    routed = shape.expert_layers * shape.experts * shape.expert_parameters / shape.parameters
    return (1 - routed) * work.resting_bytes + routed * work.weight_bytes


def _count_shards(work: Work) -> int:
    """Return the ranks among which everything is divided."""
    return work.axes.shards if work.sharded else 1


def kept_bytes(shape: Shape, work: Work) -> float:
    """Return the bytes that one layer keeps of a micro-batch for its backward pass, with fused kernels.

    A recomputed layer keeps its input.
    """
    if work.checkpointing == "full" and work.checkpointed_fraction == 1:
        _, r, along = _elements(work)
        return work.tokens * shape.hidden * r / along
    return used_bytes(shape, work)


def used_bytes(shape: Shape, work: Work) -> float:
    """Return the bytes that one layer keeps without recomputation.

    They are inputs of the norms (r each) and of the products (e each, gathered again in backward); queries, keys and
    values as projected, rotated (not the values) and laid out for the attention, and its result; of the feed-forward
    network both halves, the activated one and their product; for each of a token's experts also the token as it goes
    in, and the result before it is weighed.
    """
    return work.tokens * _used_width(shape, work.axes.tp, *_elements(work))


@lru_cache(maxsize=1024)
def _used_width(shape: Shape, t: int, e: float, r: float, along: int) -> float:
    """Return the bytes that one layer keeps of each token."""
    h = shape.hidden
    attention = e * (3 * shape.query_width + 5 * shape.key_width + shape.heads * shape.value_dim) / t
    inner = shape.intermediate
    if shape.experts:
        inner = shape.experts_per_token * shape.expert_intermediate + shape.shared_intermediate
    feed_forward = e * inner * (4 if shape.gated else 2) / t
    routed = 2 * e * h * shape.experts_per_token * shape.expert_layers / shape.layers if shape.experts else 0.0
    return shape.norms * h * r / along + 2 * e * h / along + attention + feed_forward + routed


def offloaded_bytes(shape: Shape, work: Work) -> float:
    """Return the bytes that one layer sends to the host for each micro-batch, where its activations wait there.

    A layer that runs again sends its input.  For any other, torch's save_on_cpu copies whatever operations save, as
    often as they do, and weights as they are multiplied with; a stream of its own copies each tensor once, and of
    weights those that autocast made for the products.  On the ghost
    the latter sends 1.06 to 1.3 times as much (bf16), and 1.6 times for GPT-2, whose activation function keeps each
    of its steps.
    """
    _, r, along = _elements(work)
    entering = work.tokens * shape.hidden * r / along
    if work.checkpointing in ("selective", "alternate"):
        return entering
    whole = (1.0 if work.copies_beside else SAVED_AGAIN) * used_bytes(shape, work) + _scores_bytes(shape, work)
    if not work.copies_beside or (work.autocast and not work.lora_rank):
        whole += _multiplied_bytes(shape, work)
    again = work.checkpointed_fraction if work.checkpointing == "full" else 0.0
    return again * entering + (1 - again) * whole


def _scores_bytes(shape: Shape, work: Work) -> float:
    """Return the bytes of a layer's attention scores, where no kernel makes them again.

    They are kept as softmax in fp32, as probabilities in the dtype of the products, and in that dtype once more where
    they are capped or get sinks.
    """
    if not (work.attention in ("eager", "math") or (work.attention == "auto" and shape.keeps_scores)):
        return 0.0
    e = ELEMENT_BYTES[kept_dtype(work.dtype)]
    each = (4 if e == 4 else 4 + e) + (e if shape.keeps_scores else 0)
    return float(work.tokens * work.seq_len * shape.heads / work.axes.tp * each)


def _multiplied_bytes(shape: Shape, work: Work) -> float:
    """Return the bytes of a layer's weights in the dtype of its products; those in 4 bits are not saved."""
    if work.quantized:
        return 0.0
    routed = shape.experts * shape.expert_parameters
    expert_share = shape.expert_layers / shape.layers if routed else 0.0
    with_experts = shape.expert_layer_parameters - routed + routed / work.axes.ep if routed else 0.0
    weights = (1 - expert_share) * shape.dense_layer_parameters + expert_share * with_experts
    return weights / work.axes.tp * ELEMENT_BYTES[kept_dtype(work.dtype)]


def _elements(work: Work) -> tuple[float, float, int]:
    """Return the bytes of an element of the products and of the residual stream, and the ranks that divide that."""
    e = ELEMENT_BYTES[kept_dtype(work.dtype)]
    return e, 4 if work.autocast and e < 4 else e, work.axes.tp if work.sequence_parallel else 1


def logit_bytes(shape: Shape, work: Work) -> float:
    """Return the peak bytes of the loss; 0 where it runs in slices.

    They are the logits, their fp32 copy that becomes the softmax, and its gradient.
    """
    if work.loss != "plain":
        return 0.0
    e = ELEMENT_BYTES[kept_dtype(work.dtype)]
    return work.tokens * shape.vocab / work.axes.tp * (e + 8)


def estimate_bytes(shape: Shape, work: Work, split: Split | None = None, *, main_weights: bool = False) -> float:
    """Return the bytes of the fullest stage's states and activations.

    Stage i of p holds p - i micro-batches under 1F1B.
    """
    split = split or split_equally(shape.layers, work.axes.pp)
    last = len(split.layers) - 1
    kept, logits = kept_bytes(shape, work), logit_bytes(shape, work)
    own_head = not shape.tied or split.head > 0
    return max(
        state_bytes(shape, work, layers, (stage == 0) + (stage == split.head and own_head), main_weights=main_weights)
        + min(work.grad_accum, last + 1 - stage) * layers * kept
        + (logits if stage == split.loss else 0.0)
        for stage, layers in enumerate(split.layers)
    )
