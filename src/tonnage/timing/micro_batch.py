"""Seconds of one micro-batch on one rank: an average layer, the embedding and the head, forward and backward."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from tonnage.cluster import Cluster, Device
from tonnage.timing import compiled, rates
from tonnage.timing.fabrics import expert_fabric, tensor_fabric
from tonnage.timing.head import embedding_operations, head_operations
from tonnage.timing.keys import cached_by, layer_key
from tonnage.timing.layer import layer_operations, layer_weights
from tonnage.timing.micro_batch_exchanges import (
    EMBEDDING_CALLS,
    HEAD_CALLS,
    count_loss_calls,
    expert_exchange,
    is_piped,
    layer_exchange,
    tensor_exchange,
)
from tonnage.timing.operations import ELEMENT_BYTES, Passes, Slice, kept_dtype
from tonnage.timing.rates import Card, Seconds
from tonnage.timing.recomputation import BY_OPERATION, Recomputation, plan_recomputation, recomputed_seconds
from tonnage.timing.shape import Shape
from tonnage.timing.software import CHOOSING, Software
from tonnage.timing.weights import count_modules
from tonnage.timing.work import Work

_INT8_PRODUCT_SECONDS: Final = 600e-6
"""Seconds of the host for a pass through a product by LLM.int8: the excess of one step over all else (QLoRA of Llama
3.2 1B on an H200, measurements/h200-2026-11-26b.jsonl)."""

_HOOKS_SECONDS: Final = 3.1e-3
"""Seconds of the host for each pass through a layer whose weights DeepSpeed's stage 3 gathers, by hooks around each
module: two steps of a network of 32 layers on an H200 (measurements/h200-2026-11-26.jsonl) took 3.0 and 3.3 ms more
than by stages 0 to 2, which have none."""


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Seconds of a part of the network for one micro-batch on one rank."""

    card: Seconds
    """Seconds of the card for forward and backward."""
    again: Seconds
    """Seconds of the card for what runs again."""
    repeats: float
    """Layers of the part that run again."""
    exchange: float
    """Seconds of tensor, context and expert parallelism that nothing hides."""
    waits: float
    """Latencies of its collectives."""
    calls: float = 0.0
    """Passes through compiled code, which launches all kernels of the part; 0: none is compiled."""

    def seconds(self, software: Software) -> float:
        """Return the seconds that the card works or that the host launches and waits, whichever is longer."""
        return max(self.card.total + self.again.total + self.exchange, self.host_seconds(software))

    def with_waits(self, seconds: float) -> "PassSeconds":
        """Return the same part, in which the host waits for so many seconds more."""
        return PassSeconds(self.card, self.again, self.repeats, self.exchange, self.waits + seconds, self.calls)

    def host_seconds(self, software: Software) -> float:
        """Return the seconds of the host: launching kernels, waiting for collectives, and running layers again."""
        kernels, looped = (self.card.kernels + self.again.kernels), (self.card.looped + self.again.looped)
        if self.calls:
            launching = kernels * software.compiled_kernel_seconds + self.calls * software.compiled_call_seconds
        else:
            in_loops = software.looped_kernel_seconds or software.kernel_seconds
            launching = (kernels - looped) * software.kernel_seconds + looped * in_loops
        return launching + self.repeats * software.again_seconds + self.waits


@cached_by(layer_key)
def network_seconds(
    shape: Shape, work: Work, cluster: Cluster, card: Card, software: Software
) -> tuple[PassSeconds, PassSeconds, PassSeconds]:
    """Return the seconds of an average layer, of the embedding and of the head, for one micro-batch."""
    recomputation = plan_recomputation(shape, work, software)
    loss = "inductor" if (work.compiled, work.loss) == ("model", "plain") else work.loss
    part = _slice_of(shape, work, cluster, software)
    both, again, embedding, head = _card_seconds(
        shape, part, recomputation, cluster.device, software, loss, work.accumulated_bytes, work.experts_even
    )
    fabric = tensor_fabric(cluster, card, software, is_piped(work, cluster), work.axes.tp > cluster.gpus_per_node)
    exchange, waits = layer_exchange(shape, work, cluster, fabric, software)
    passes = 2 + work.checkpointed_fraction * (work.checkpointing == "full")
    if work.int8:
        waits += _INT8_PRODUCT_SECONDS * count_modules(shape) * passes
    waits += _HOOKS_SECONDS * passes * work.hooked
    if work.axes.ep > 1 and shape.experts:
        experts_fabric = expert_fabric(cluster, card, fabric)
        exchange += expert_exchange(shape, work, cluster, experts_fabric, software, both.total)
    repeats = work.checkpointed_fraction if work.checkpointing != "none" else 0.0
    calls = 0.0 if work.compiled == "none" else (2 + repeats) / (shape.layers if work.compiled == "model" else 1)
    embedding_rings = tensor_exchange(shape, work, cluster, fabric, software, EMBEDDING_CALLS)
    head_calls, loss_calls = HEAD_CALLS * shape.predicted, count_loss_calls(work) * shape.predicted
    head_rings = tensor_exchange(shape, work, cluster, fabric, software, head_calls, loss_calls)
    return (
        PassSeconds(both, again, repeats, exchange, waits, calls),
        PassSeconds(embedding, Seconds(), 0.0, *embedding_rings),
        PassSeconds(head, Seconds(), 0.0, *head_rings),
    )


def _slice_of(shape: Shape, work: Work, cluster: Cluster, software: Software) -> Slice:
    """Return what one rank does of a layer for one micro-batch."""
    between = "fp32" if work.wide_between else kept_dtype(work.dtype)
    return Slice(
        tokens=work.tokens,
        seq_len=work.seq_len // (1 if work.masked else work.packing),
        tp=work.axes.tp,
        ep=work.axes.ep,
        sequence_parallel=work.sequence_parallel and work.axes.tp > 1,
        dtype=work.dtype,
        residual_bytes=4 if work.autocast else int(ELEMENT_BYTES[between]),
        fused=software.fused,
        liger=work.loss == "liger-trainer",
        backend=_attention_backend(shape, work, cluster, software, between),
        trained=not work.lora_rank,
        casts=work.autocast and work.weight_bytes > ELEMENT_BYTES[work.dtype],
        lora_rank=work.lora_rank,
        adapted=work.adapted,
        wide_adapters=work.wide_adapters,
        quantized=work.quantized,
        wide_between=work.wide_between,
        captured=work.captured,
        experts_fused=work.experts_fused,
        experts_whole=work.experts_whole,
        compiled=work.compiled != "none",
        masked=work.masked,
        experts=shape.experts > 0 and not shape.dense_layers,
    )


def _attention_backend(shape: Shape, work: Work, cluster: Cluster, software: Software, dtype: str) -> str:
    """Return the attention backend; where the work leaves it open, the one that torch chooses."""
    if work.attention != "auto":
        return work.attention
    if shape.keeps_scores:
        return "eager"
    backend = "efficient" if shape.biased_scores else rates.auto_backend(cluster.device, dtype)
    if work.masked and backend == "flash":
        backend = "efficient"  # flash attention takes no mask
    if backend == "efficient" and shape.kv_heads < shape.heads and not (software.fused or work.masked):
        backend = "math"  # the efficient one has no keys that queries share; beside a mask they are copied
    return backend


@lru_cache(maxsize=8192)
def _card_seconds(
    shape: Shape,
    part: Slice,
    recomputation: Recomputation,
    device: Device,
    software: Software,
    loss: str,
    accumulated_bytes: int,
    experts_even: bool,
) -> tuple[Seconds, Seconds, Seconds, Seconds]:
    """Return the seconds of the card for an average layer (both passes; what runs again), the embedding and the head.

    Many layouts give a rank as much to compute, whatever they exchange.
    """
    card = rates.card(device)
    both, embedding, head = _both_passes(shape, part, device, card, loss)
    again = _recomputed_seconds(shape, part, device, card, recomputation)
    weights = layer_weights(shape, part)
    if shape.experts and shape.dense_layers:
        with_experts = replace(part, experts=True)
        routed, _, _ = _both_passes(shape, with_experts, device, card, loss)
        routed_again = _recomputed_seconds(shape, with_experts, device, card, recomputation)
        share = shape.expert_layers / shape.layers
        both = both * (1 - share) + routed * share
        again = again * (1 - share) + routed_again * share
        weights = weights * (1 - share) + layer_weights(shape, with_experts) * share
    if accumulated_bytes and part.trained:
        adding = weights * accumulated_bytes
        both = both + Seconds(memory=adding / (rates.bandwidth(device) * card.memory), kernels=4)
    if recomputation.kind in BY_OPERATION:
        both, again = (one + Seconds(kernels=CHOOSING * one.kernels) for one in (both, again))
    expert_factor = software.fused_expert_factor if part.experts_fused else software.expert_factor
    if experts_even:
        expert_factor = software.matmul_factor
    factors = (software.matmul_factor, software.attention_factor, software.memory_factor, expert_factor)
    return (
        both.scaled(*factors),
        again.scaled(*factors) * recomputation.fraction,
        embedding.scaled(*factors),
        head.scaled(*factors) * shape.predicted,
    )


@lru_cache(maxsize=8192)
def _both_passes(
    shape: Shape, part: Slice, device: Device, card: Card, loss: str
) -> tuple[Seconds, Seconds, Seconds]:
    """Return the seconds of a layer, of the embedding and of the head, forward and backward together."""

    def seconds(passes: Passes) -> Seconds:
        forward, backward = (
            rates.seconds(operations, device, card, backend=part.backend, seq_len=part.seq_len)
            for operations in (passes.forward, passes.backward)
        )
        return forward + backward

    head = head_operations(shape, part, loss)
    return seconds(_layer(shape, part)), seconds(embedding_operations(shape, part)), seconds(head)


def _layer(shape: Shape, part: Slice) -> Passes:
    return compiled.layer(shape, part) if part.compiled else layer_operations(shape, part)


def _recomputed_seconds(
    shape: Shape, part: Slice, device: Device, card: Card, recomputation: Recomputation
) -> Seconds:
    return recomputed_seconds(_layer(shape, part).forward, part, device, card, recomputation)
