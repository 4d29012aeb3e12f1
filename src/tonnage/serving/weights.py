"""The matrices of a served network on one rank, as an engine merges and divides them, and their bytes.

Engines multiply queries, keys and values by one matrix, gate and up by another, and keep all experts of a layer in
one tensor.  Tensor-parallel ranks have equal parts of most of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Final

from tonnage.serving.kv_cache import heads_on_rank
from tonnage.serving.quantization import Quantization
from tonnage.timing.shape import Shape
from tonnage.units import MIB

_VOCAB_MULTIPLE: Final = 64
"""Rows of words are padded to a multiple of this (vLLM's `VocabParallelEmbedding`)."""

_EXPERT_MULTIPLE: Final = 256
"""Inner width of MXFP4 experts is padded to a multiple of this on each rank: vLLM's load of gpt-oss-20b takes 13.47
GiB for 12.8 unpadded."""

MADE_AT_START: Final = ("rotation table", "latent up, absorbed")
"""Weights that an engine makes of others when it starts: no file has them."""

_ROUNDING_BYTES: Final = 512
"""Multiple of bytes of a block of torch's allocator."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """Matrices of one role, all alike, on one rank."""

    name: str
    """Role, such as `qkv`."""
    rows: int
    """Outputs."""
    columns: int
    """Inputs."""
    stacked: int = 1
    """Matrices in one tensor: the experts of a layer."""
    count: int = 1
    """Tensors."""
    kind: str = "linear"
    """`linear`, `expert`, or `other`: never quantized."""
    own_bytes: int | None = None
    """Bytes of an element that is not quantized, where they are not those that the engine computes with."""

    @property
    def elements(self) -> int:
        """Return the number of weights."""
        return self.rows * self.columns * self.stacked * self.count

    def is_quantized(self, quantization: Quantization) -> bool:
        """Return True if the format applies to these matrices."""
        return quantization.bits < 16 and (
            (self.kind == "expert" and not quantization.keeps_experts)
            or (self.kind == "linear" and not quantization.experts_only)
        )

    def bytes(self, quantization: Quantization, *, element_bytes: int = 2, unsplit_bytes: int | None = None) -> int:
        """Return the bytes that torch's allocator holds for them; `unsplit_bytes`: as `allocated_bytes` says."""
        if not self.is_quantized(quantization):
            matrices = self.rows * self.columns * self.stacked
            return self.count * allocated_bytes(matrices * (self.own_bytes or element_bytes), unsplit_bytes)
        elements = ceil(self.rows * self.columns * self.stacked * quantization.bits / 8)
        scales = self.stacked * quantization.overhead_bytes(self.rows, self.columns)
        return self.count * sum(allocated_bytes(size, unsplit_bytes) for size in (elements, scales))


def allocated_bytes(size_bytes: int, unsplit_bytes: int | None = None) -> int:
    """Return the bytes that torch's caching allocator gives to a tensor that is kept for good.

    A size from 10 MiB on gets segments of whole 2 MiB; a rest of up to 1 MiB stays with it (allocator/), and any rest
    of a tensor from `unsplit_bytes` on (`max_split_size_mb`).
    """
    if size_bytes >= 10 * MIB:
        segment = ceil(size_bytes / (2 * MIB)) * 2 * MIB
        is_unsplit = unsplit_bytes is not None and size_bytes >= unsplit_bytes
        if is_unsplit or segment - size_bytes <= MIB:
            return segment
    return ceil(size_bytes / _ROUNDING_BYTES) * _ROUNDING_BYTES


def list_weights(
    shape: Shape,
    *,
    tp: int = 1,
    expert_tp: int | None = None,
    ep: int = 1,
    layers: range | None = None,
    positions: int = 0,
    rotating: float = 1.0,
    table_bytes: int | None = None,
    padded_experts: bool = False,
    router_bytes: int | None = None,
) -> tuple[Weight, ...]:
    """Return the matrices of one rank, for the layers of its pipeline stage (default: all of them).

    `positions` are the rows of the tables of rotations, `rotating` is the part of the layers that rotate,
    `table_bytes` are those of an element if they are not a weight's.  `ep` ranks divide whole experts, or `expert_tp`
    (default: `tp`) parts of each.  Raises ValueError for a degree that the network's heads cannot be divided by.
    """
    stage = range(shape.layers) if layers is None else layers
    is_first, is_last = stage.start == 0, stage.stop == shape.layers
    found = list(_attention(shape, tp, len(stage)))
    found += _feed_forward(shape, tp, expert_tp or tp, ep, stage, padded_experts, router_bytes)
    small = len(stage) * (shape.norm_parameters + _bias_elements(shape))
    vocab = ceil(ceil(shape.vocab / _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE / tp)
    if is_first or (is_last and shape.tied):
        found.append(Weight(name="embedding", rows=vocab, columns=shape.hidden, kind="other"))
    if is_last and not shape.tied:
        found.append(Weight(name="head", rows=vocab, columns=shape.hidden, kind="other"))
    if is_first:
        small += max(0, shape.extra_parameters) + shape.positions * shape.hidden
    if small:
        found.append(Weight(name="norms and biases", rows=1, columns=small, kind="other"))
    rotated = round(shape.rotary / rotating * (shape.rotary_dim or shape.head_dim))
    if rotated and positions:
        table = Weight(name="rotation table", rows=positions, columns=rotated, kind="other", own_bytes=table_bytes)
        found.append(table)
    return tuple(found)


def _attention(shape: Shape, tp: int, layers: int) -> Iterator[Weight]:
    h, queries = shape.hidden, _divide(shape.heads, tp, "heads")
    if shape.latent_rank:
        shared = shape.latent_rank + shape.rotary_dim
        if shape.query_rank:
            yield Weight(name="latent down", rows=shape.query_rank + shared, columns=h, count=layers)
            yield Weight(name="query up", rows=queries * shape.head_dim, columns=shape.query_rank, count=layers)
        else:
            yield Weight(name="query", rows=queries * shape.head_dim, columns=h, count=layers)
            yield Weight(name="latent down", rows=shared, columns=h, count=layers)
        inner = queries * (shape.head_dim - shape.rotary_dim + shape.value_dim)
        yield Weight(name="latent up", rows=inner, columns=shape.latent_rank, count=layers)
        yield Weight(name="latent up, absorbed", rows=inner, columns=shape.latent_rank, count=layers, kind="other")
    else:
        width = shape.head_dim + shape.value_dim
        rows = queries * shape.head_dim + heads_on_rank(shape.kv_heads, tp) * width
        yield Weight(name="qkv", rows=rows, columns=h, count=layers)
    yield Weight(name="output", rows=h, columns=queries * shape.value_dim, count=layers)


def _feed_forward(
    shape: Shape, tp: int, expert_tp: int, ep: int, stage: range, padded: bool, router_bytes: int | None
) -> Iterator[Weight]:
    h, matrices = shape.hidden, 2 if shape.gated else 1
    dense = sum(index < shape.dense_layers for index in stage) if shape.experts else len(stage)
    if dense and shape.intermediate:
        inner = _divide(shape.intermediate, tp, "inner width")
        yield Weight(name="gate and up", rows=matrices * inner, columns=h, count=dense)
        yield Weight(name="down", rows=h, columns=inner, count=dense)
    routed = len(stage) - dense
    if not shape.experts or not routed:
        return
    experts = ceil(shape.experts / ep)  # of the fullest rank
    inner = shape.expert_intermediate
    if ep == 1:
        inner = _divide(inner, expert_tp, "experts' inner width")
    if padded:
        inner = ceil(inner / _EXPERT_MULTIPLE) * _EXPERT_MULTIPLE
    yield Weight(name="experts up", rows=matrices * inner, columns=h, stacked=experts, count=routed, kind="expert")
    yield Weight(name="experts down", rows=h, columns=inner, stacked=experts, count=routed, kind="expert")
    yield Weight(name="router", rows=shape.experts, columns=h, count=routed, kind="other", own_bytes=router_bytes)
    if shape.shared_intermediate:
        inner = _divide(shape.shared_intermediate, tp, "shared experts' inner width")
        yield Weight(name="shared up", rows=matrices * inner, columns=h, count=routed)
        yield Weight(name="shared down", rows=h, columns=inner, count=routed)


def _bias_elements(shape: Shape) -> int:
    """Return the biases of a layer (those of experts on one rank without expert parallelism)."""
    attention = (shape.query_width + 2 * shape.key_width if shape.biases else 0) + (
        shape.hidden if shape.biases in ("qkvo", "all") else 0
    )
    inner = shape.intermediate * (2 if shape.gated else 1) + shape.hidden if shape.biases == "all" else 0
    experts = 0
    if shape.expert_biases:
        experts = shape.experts * (2 * shape.expert_intermediate + shape.hidden + 1)
    return attention + inner + experts


def _divide(whole: int, parts: int, what: str) -> int:
    if whole % parts:
        raise ValueError(f"{whole:,} {what} cannot be divided among {parts} ranks")
    return whole // parts
