"""A layer that torch.compile's Inductor has made kernels of: what it passes over memory between its products.

Products and attention stay as they are.  What is between two of them is one kernel, that reads what comes from them
and from the residual stream and writes what the next one takes; how many bytes each moves stands beside it, and was
counted on the kernels of three steps of Llama 3.2 1B on an H200 (measurements/h200-2026-11-26b.events.jsonl: under
autocast, in bf16, with LoRA).  With the least of each kernel they take as long as the former two's within 12 %
(tests/benchmarks/test_time_benchmark.py).  Letters: timing/shape.py; e bytes of an element of the computation, r
bytes of one of the residual stream.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Final

from tonnage.timing import operations
from tonnage.timing.adapted import has_adapter
from tonnage.timing.operations import ELEMENT_BYTES, Operation, Passes, Slice
from tonnage.timing.shape import Shape

_AS_THEY_ARE: Final = ("matmul", "attention", "copy")
"""Families that Inductor makes nothing else of; copies are casts and dequantized weights."""


_BIASED: Final = {"qkv": ("qkv", "query", "key", "value"), "qkvo": ("qkv", "query", "key", "value", "output")}
"""Products that have a bias; of `all` each."""


@lru_cache(maxsize=4096)
def layer(shape: Shape, part: Slice) -> Passes:
    """One layer's operations."""
    written = operations.layer(shape, part)
    between = _between(shape, part)
    return Passes(
        (*_kept(written.forward), *between.forward, *_adapters(shape, part)),
        (*_kept(written.backward), *between.backward, *_adapters(shape, part, backward=True)),
    )


def _kept(written: Iterable[Operation]) -> Iterator[Operation]:
    for op in written:
        if op.name.startswith("routing"):  # sorts, and sums by expert
            yield op
        elif op.family in _AS_THEY_ARE and " adapter" not in op.name:
            yield replace(op, plain=True, kernels=op.kernels if op.family == "copy" else max(op.products, op.kernels))


def _between(shape: Shape, part: Slice) -> Passes:
    """Norms with the sums before them, the last sum, rotations and activations, and scores that are kept.

    Forward: the first norm r + e; the second, with the sum before it, r + 2 e; the last sum 2 r + 2 e.  Backward: a
    cast of the gradient (r + e, where they differ); a norm's 3 r + 3 e, as three products give their parts of the
    gradient, or two and the sum's other side.  A norm behind a product: 2 e and 3 e.
    """
    e, r = ELEMENT_BYTES[part.between], part.residual_bytes
    stream = float(part.tokens * shape.hidden)
    after = max(shape.norms - 2, 0)
    masks = 2 if shape.dropout else 0
    ahead = stream * (4 * r + 5 * e + after * 2 * e + masks)
    behind = stream * (6 * r + 6 * e + (r + e if r != e else 0) + after * 3 * e + masks) + _biases(shape, part, e)
    turned = part.tokens * (shape.query_width + shape.key_width) * (shape.rotary or shape.head_norms) * 2 * e
    normed = part.tokens * (shape.query_width + shape.key_width) * e * bool(shape.head_norms)
    inner = part.tokens * operations.inner_width(shape, part) * e
    scores, scores_back = _scores(shape, part)

    def one(name: str, moved: float, kernels: int) -> Operation:
        return Operation(name, "pointwise", part.dtype, 0, moved, kernels, plain=True)

    return Passes(
        (
            one("norms", ahead, 3 + after),
            one("rotation", turned + normed, 2),
            one("activation", inner * (3 if shape.gated else 2), 1),
            *scores,
        ),
        (
            one("norms backward", behind, 4 + after),
            one("rotation backward", turned + 5 * normed, 2),
            one("activation backward", inner * (5 if shape.gated else 3), 1),
            *scores_back,
        ),
    )


def _biases(shape: Shape, part: Slice, e: float) -> float:
    """Bytes of the sums that are the gradients of biases: the gradient of each product's result is read once more."""
    if not shape.biases or not part.trained:
        return 0.0
    biased = _BIASED.get(shape.biases)
    return sum(one.m * one.n * e for one in operations.products(shape, part) if not biased or one.name in biased)


def _scores(shape: Shape, part: Slice) -> tuple[list[Operation], list[Operation]]:
    """Of attention that keeps its scores: read and written, 2 e; in backward the gradient and what was kept, 3 e."""
    if part.backend not in ("eager", "math"):
        return [], []
    moved = part.tokens * part.seq_len * shape.heads * ELEMENT_BYTES[part.between]
    return (
        [Operation("softmax", "pointwise", part.dtype, 0, 2 * moved, 1, plain=True)],
        [Operation("softmax backward", "pointwise", part.dtype, 0, 3 * moved, 1, plain=True)],
    )


def _adapters(shape: Shape, part: Slice, *, backward: bool = False) -> Iterator[Operation]:
    """LoRA beside a linear module: two small products, whose scaled sum is in the kernel that takes it.

    Forward reads the input (k), writes what B makes of it, reads it and writes the sum (3 n); backward reads the
    output's gradient twice (2 n) and the input, writes the input's and reads it (3 k).
    """
    if not part.lora_rank:
        return
    e = 4.0 if part.wide_adapters else ELEMENT_BYTES[part.dtype]
    for product in operations.products(shape, part):
        if not has_adapter(product.name, part.adapted):
            continue
        moved = product.m * e * (3 * product.k + 2 * product.n if backward else product.k + 3 * product.n)
        flops = 2.0 * product.m * part.lora_rank * (product.k + product.n) * (2 if backward else 1)
        name = product.name + (" adapter backward" if backward else " adapter")
        yield Operation(name, "pointwise", part.dtype, flops, moved, 6 if backward else 4, plain=True)
