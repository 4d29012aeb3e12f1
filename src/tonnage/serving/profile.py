"""Peak of an engine's profile run above the weights: the forward pass of a full step, or the sampler after it.

vLLM runs one step of `max_num_batched_tokens` tokens and samples for `max_num_seqs` requests before it sizes the KV
cache.  The terms below are the tensors that are alive then, counted from its code.  They meet the peaks of 45 logs of
0.19.0 and 13 older ones to about 0.01 GiB, and those of 0.33.0 on the ghost to 0.03 (docs/reference/serving.md).

Where the network is compiled in the same run, torch tries fused kernels on tensors that it makes for them: a second
table of words, beside words and their embeddings.  It shows where few sequences are sampled: 0.50 GiB for Llama 8B on
the ghost (0.19.0, 2,048 tokens, 256 sequences), 1.06 GiB in all for Qwen2.5-7B on an L40S (0.22.0, 128 sequences).

Latent attention is profiled as if a step had C tokens of earlier chunks, whose keys and values are projected up:
C = min(max(8 x longest request, 4 x blocks' tokens x S), 65,536) (MLACommonMetadataBuilder, as the tensor of
`MLAAttention.forward_impl`).  With 128 heads these are 4 GiB.  A layer that predicts a further token runs while the
network's output is kept, and what it joins (deepseek_mtp.py): 6 T x h are alive in its attention instead of 2.

Letters: T tokens of a step, S sequences, h width, f inner width, V words.
"""

from dataclasses import dataclass
from math import ceil
from typing import Final

from tonnage.cluster import Device
from tonnage.serving.facts import VllmFacts
from tonnage.serving.quantization import Quantization
from tonnage.timing.shape import Shape
from tonnage.units import KIB, MIB

_FORWARD_STREAMS: Final = 3.75
"""Tensors of T x h that are alive beside the inner ones at the peak of the compiled forward pass: residual, output,
and rests in the allocator's segments.  Two logs whose peak is the forward pass (CodeLlama-7b, Granite-3.1-8b)."""

_MOST_CONTEXT: Final = 65_536
"""Tokens of earlier chunks whose keys and values latent attention projects up at once, at most."""

_STATE_STREAMS: Final = 2
"""The same at the peak inside a layer with a state: residual and input."""

_PREDICTING_STREAMS: Final = 4
_PREDICTING_COMPILED: Final = 1
"""Tensors of T x h beside a layer that predicts a further token, which other layers do not have: the network's
output, and where nothing is compiled embeddings and two norms, which its code names until it ends."""

_HOPPER: Final = (9, 0)


@dataclass(frozen=True, kw_only=True)
class ProfilePeak:
    """Peak of the profile run on one rank."""

    forward_bytes: int
    """Peak of the forward pass."""
    sampler_bytes: int
    """Peak of the sampler; 0 on a stage that does not sample."""
    compile_bytes: int = 0
    """Peak while torch.compile tries kernels on tensors of its own; 0 where it does not."""

    @property
    def bytes(self) -> int:
        """Return the highest of them."""
        return max(self.forward_bytes, self.sampler_bytes, self.compile_bytes)


def cublas_workspace_bytes(device: Device) -> int:
    """Return torch's workspace for cuBLAS: 32 MiB from Hopper on, before 8.125 MiB (its CUDABlas.cpp)."""
    return 32 * MIB if device.capability >= _HOPPER else 2 * 4096 * KIB + 8 * 16 * KIB


def profile_peak(
    shape: Shape,
    *,
    tokens: int,
    sequences: int,
    device: Device,
    facts: VllmFacts,
    quantization: Quantization,
    tp: int = 1,
    ep: int = 1,
    dp: int = 1,
    samples: bool = True,
    staged: bool = False,
    towers: bool = False,
    embeds: bool = False,
    predicts: bool = False,
    eager: bool = False,
    context: int = 0,
    state_elements: int = 0,
    element_bytes: int = 2,
) -> ProfilePeak:
    """Return the peak of a profile run; `staged`: the rank is one of several pipeline stages.

    `towers`: the network takes embeddings of images in place of words, for which vLLM keeps a buffer.  `embeds`: the
    rank's compiled part begins with the table of words, and is compiled in this run: torch then makes a second table
    to try kernels on.  `predicts`: its own layers draft further tokens, after a buffer of the residual stream.
    `context`: tokens of earlier chunks (`context_tokens`).  `state_elements`: those of a token that are alive in the
    widest layer with a state.  Experts compute the tokens of all `dp` replicas.
    """
    h = shape.hidden
    gathered = dp * tokens if shape.experts else tokens
    lasting = _expert_workspace_bytes(shape, gathered, quantization, tp, ep)
    lasting += cublas_workspace_bytes(device) if facts.counts_workspace else 0
    lasting += tokens * h * element_bytes * (towers + facts.keeps_stream + predicts)
    lasting += int(sequences * shape.vocab * facts.kept_bytes) if samples else 0
    inner = _inner_elements(shape, tp) * element_bytes
    if quantization.activation_bytes < element_bytes and quantization.bits < 16:
        inner += _down_elements(shape, tp) * quantization.activation_bytes  # the quantized input of a product
    forward = int(tokens * (inner + _FORWARD_STREAMS * h * element_bytes))
    if state_elements:
        of_state = tokens * (state_elements + _STATE_STREAMS * h) * element_bytes
        forward = max(forward, of_state) if shape.heads else of_state
    if shape.latent_rank:
        forward = max(forward, _latent_elements(shape, tokens, context, tp) * element_bytes)
    forward += 2 * (gathered - tokens) * h * element_bytes  # what experts take and give
    if predicts:
        forward += (_PREDICTING_STREAMS if eager else _PREDICTING_COMPILED) * tokens * h * element_bytes
    if staged and not samples:
        forward += 2 * tokens * h * element_bytes  # what the next stage gets: the stream and its residual
    table = ceil(shape.vocab / tp) * h * element_bytes
    compiling = lasting + table + 2 * tokens * h * element_bytes if embeds else 0
    if not samples:
        return ProfilePeak(forward_bytes=lasting + forward, sampler_bytes=0, compile_bytes=compiling)
    rows = min(sequences, tokens)
    word_bytes = element_bytes + facts.sampler_bytes
    sampler = (tokens + 2 * rows) * h * element_bytes + rows * shape.vocab * word_bytes
    if facts.sampler_rows:
        sampler += device.sms * shape.vocab * 4
    return ProfilePeak(forward_bytes=lasting + forward, sampler_bytes=lasting + sampler, compile_bytes=compiling)


def context_tokens(*, longest: int, sequences: int, block_tokens: int) -> int:
    """Return the tokens of earlier chunks whose keys and values latent attention projects up at once."""
    return min(max(8 * longest, 4 * sequences * block_tokens), _MOST_CONTEXT)


def _latent_elements(shape: Shape, tokens: int, context: int, tp: int) -> int:
    """Return the elements that are alive in latent attention: the stream and its norm, compressed queries and keys,
    their norms, queries, the output, and what is projected up of the context."""
    heads = shape.heads // tp
    compressed = 2 * shape.query_rank + 2 * shape.latent_rank + shape.rotary_dim
    of_token = 2 * shape.hidden + compressed + heads * (shape.head_dim + shape.value_dim)
    return tokens * of_token + context * heads * (shape.head_dim - shape.rotary_dim + shape.value_dim)


def _down_elements(shape: Shape, tp: int) -> float:
    """Return the inner elements of a token in the widest dense layer."""
    if shape.experts and not shape.dense_layers:
        return shape.shared_intermediate / tp
    return shape.intermediate / tp


def _inner_elements(shape: Shape, tp: int) -> float:
    """Return the elements of a token inside a feed-forward network at its peak: both halves, and their product."""
    return _down_elements(shape, tp) * (3 if shape.gated else 2)


def _expert_workspace_bytes(shape: Shape, tokens: int, quantization: Quantization, tp: int, ep: int) -> int:
    """Return the two buffers that vLLM's fused experts keep for good, for all copies of the tokens of a step.

    MXFP4's kernels keep none.
    """
    if not shape.experts or quantization.experts_only:
        return 0
    inner = shape.expert_intermediate if ep > 1 else shape.expert_intermediate // tp
    wide = inner * (2 if shape.gated else 1)
    return tokens * shape.experts_per_token * (max(inner, shape.hidden) + max(wide, shape.hidden)) * 2
