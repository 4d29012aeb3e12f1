"""Operations of attention: scores, softmax, and their product with the values."""

from typing import Final

from tonnage.timing.operations import ELEMENT_BYTES, Operation, Slice
from tonnage.timing.shape import Shape

_UNMASKED: Final = (1.0, 1.0)
MASKED: Final = {"cudnn": (2.6, 2.15), "efficient": (1.8, 1.5)}
"""Seconds of attention, forward and backward, that is given a causal mask / of attention that knows it is causal: our
H200's and H100's `op sdpa` in measurements, over 2,048 tokens."""

_SOFTMAX_FLOPS: Final = 88
"""Operations of Megatron's fused softmax for each score in either pass, at the card's fp32 peak: 4.5 ps on an A100,
whose memory would take 2.3; A10G, L4 and V100 take what their memory takes (Aceso's operator times,
`enc-attention-softmax`)."""


def seen_tokens(shape: Shape, seq_len: int) -> float:
    """Return the keys that a query is multiplied with on average, over layers with and without a window."""
    every = seq_len / 2 if shape.causal else float(seq_len)
    if shape.window is None or shape.window >= seq_len:
        return every
    windowed = shape.window - shape.window**2 / (2 * seq_len)
    return shape.window_fraction * windowed + (1 - shape.window_fraction) * every


def attention_operations(shape: Shape, part: Slice) -> tuple[list[Operation], list[Operation]]:
    """Return the operations of attention, forward and backward; backward has five products where forward has two.

    Kernels that keep no scores skip what the mask hides; others compute it, and move b heads s^2 scores: fused code
    as `_fused_scores` says.  Eager code scales, masks, casts and takes a softmax in fp32: 15 bytes forward and 21
    backward; under autocast, where the mask's fp32 makes scores fp32, 25 and 37: the time that an H200 took for
    gpt2-medium and llama-3.2-1b more than with flash attention, at the rate of eager code's other passes.  Dropout
    reads, writes and keeps a mask of one byte, in either pass.  torch's formula ("math") multiplies in fp32 too.
    """
    heads = max(shape.heads / part.tp, 1)
    widths = heads * (shape.head_dim + shape.value_dim)
    dtype = part.between
    e = ELEMENT_BYTES[dtype]
    kept = part.tokens * widths * 2 * e
    if part.backend not in ("eager", "math"):
        flops = 2.0 * part.tokens * seen_tokens(shape, part.seq_len) * widths
        ahead, behind = MASKED.get(part.backend, _UNMASKED) if part.masked and shape.causal else _UNMASKED
        return (
            [Operation("attention", "attention", dtype, ahead * flops, kept)],
            [Operation("attention backward", "attention", dtype, 2.5 * behind * flops, 2 * kept, 2)],
        )
    scores = part.tokens * part.seq_len * heads
    flops = 2.0 * part.tokens * part.seq_len * widths
    wide = part.backend == "math" and dtype != "tf32"  # torch's own formula is computed in fp32
    ahead, behind = (25, 37) if wide or part.residual_bytes == 4 else (15, 21)
    product_dtype = "fp32" if wide else dtype
    aligned = shape.head_dim * e % 16 == 0 and shape.value_dim * e % 16 == 0
    forward = Operation("attention", "matmul", product_dtype, flops, kept, 2, aligned, True, 2)
    backward = Operation("attention backward", "matmul", product_dtype, 2 * flops, 2 * kept, 4, aligned, True, 4)
    if part.fused:
        return [forward, *_fused_scores(shape, scores)], [backward, *_fused_scores(shape, scores, backward=True)]
    dropped, kernels = (2 * e + 1, 8) if shape.dropout else (0, 7)
    return (
        [forward, Operation("softmax", "pointwise", dtype, 0, scores * (ahead + dropped), kernels)],
        [backward, Operation("softmax backward", "pointwise", dtype, 0, scores * (behind + dropped), kernels)],
    )


def _fused_scores(shape: Shape, scores: float, *, backward: bool = False) -> list[Operation]:
    """Return the passes of fused codes over scores of 16 bits, besides products.

    Products write and read them (4 bytes, backward 8), dropout reads, writes and keeps a mask (5 in both passes), the
    softmax reads what the mask does not hide and writes all: 4 bytes, backward 6; causal 3 and 4 (Aceso's operator
    times on A10G and L4 within 10 %).
    """
    suffix = " backward" if backward else ""
    kept = 3 if shape.causal else 4
    if backward:
        kept = 4 if shape.causal else 6
    passed = (8 if backward else 4) + (5 if shape.dropout else 0)
    return [
        Operation("scores" + suffix, "pointwise", "bf16", 0, scores * passed, 1 if shape.dropout else 0),
        Operation("softmax" + suffix, "softmax", "bf16", _SOFTMAX_FLOPS * scores, scores * kept),
    ]
