"""Operations of a layer under torch.compile: what Inductor's kernels pass over memory between products.

Products and attention stay as they are.  Everything between two of them is one kernel, which reads their results and
the residual stream and writes the operands of the next one.  The bytes of each kernel stand beside it.  They were
counted on the kernels of three steps of Llama 3.2 1B on an H200 (measurements/h200-2026-11-26b.events.jsonl: under
autocast, in bf16, with LoRA): moving the least bytes of each kernel takes as long as the kernels of the first two
steps did, within 12 % (tests/benchmarks/test_time_benchmark.py).  Letters: timing/shape.py; e bytes of an element of
the computation, r bytes of one of the residual stream.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Final

from tonnage.timing.adapters import has_adapter
from tonnage.timing.layer import layer_operations, products
from tonnage.timing.operations import ELEMENT_BYTES, Operation, Passes, Slice
from tonnage.timing.pointwise import inner_width
from tonnage.timing.shape import Shape

_UNCHANGED: Final = ("matmul", "attention", "copy")
"""Families that Inductor leaves as they are; copies are casts and dequantized weights."""


_BIASED: Final = {"qkv": ("qkv", "query", "key", "value"), "qkvo": ("qkv", "query", "key", "value", "output")}
"""Products that have a bias, by Shape's `biases`; for `all` each has."""


@lru_cache(maxsize=4096)
def layer(shape: Shape, part: Slice) -> Passes:
    """Return the operations of one layer."""
    eager = layer_operations(shape, part)
    between = _passes_between(shape, part)
    return Passes(
        (*_unchanged(eager.forward), *between.forward, *_adapters(shape, part)),
        (*_unchanged(eager.backward), *between.backward, *_adapters(shape, part, backward=True)),
    )


def _unchanged(eager: Iterable[Operation]) -> Iterator[Operation]:
    """Yield the operations of eager code that compiled code has too."""
    for op in eager:
        if op.name.startswith("routing"):  # sorts, and sums by expert
            yield op
        elif op.family in _UNCHANGED and " adapter" not in op.name:
            yield replace(op, plain=True, kernels=op.kernels if op.family == "copy" else max(op.products, op.kernels))


def _passes_between(shape: Shape, part: Slice) -> Passes:
    """Return norms with the sums before them, the last sum, rotations and activations, and scores that are kept.

    Forward: the first norm r + e; the second, with the sum before it, r + 2 e; the last sum 2 r + 2 e.  Backward: a
    cast of the gradient (r + e, where they differ); a norm's 3 r + 3 e, as three products give their parts of the
    gradient, or two and the sum's other side.  A norm behind a product: 2 e and 3 e.
    """
    e, r = ELEMENT_BYTES[part.between], part.residual_bytes
    stream = float(part.tokens * shape.hidden)
    after = max(shape.norms - 2, 0)
    masks = 2 if shape.dropout else 0
    ahead = stream * (4 * r + 5 * e + after * 2 * e + masks)
    behind = stream * (6 * r + 6 * e + (r + e if r != e else 0) + after * 3 * e + masks) + _bias_bytes(shape, part, e)
    turned = part.tokens * (shape.query_width + shape.key_width) * (shape.rotary or shape.head_norms) * 2 * e
    normed = part.tokens * (shape.query_width + shape.key_width) * e * bool(shape.head_norms)
    inner = part.tokens * inner_width(shape, part) * e
    scores, scores_back = _score_passes(shape, part)

    def passing(name: str, moved: float, kernels: int) -> Operation:
        return Operation(name, "pointwise", part.dtype, 0, moved, kernels, plain=True)

    return Passes(
        (
            passing("norms", ahead, 3 + after),
            passing("rotation", turned + normed, 2),
            passing("activation", inner * (3 if shape.gated else 2), 1),
            *scores,
        ),
        (
            passing("norms backward", behind, 4 + after),
            passing("rotation backward", turned + 5 * normed, 2),
            passing("activation backward", inner * (5 if shape.gated else 3), 1),
            *scores_back,
        ),
    )


def _bias_bytes(shape: Shape, part: Slice, e: float) -> float:
    """Return the bytes of summing up the gradients of biases: the gradient of each product's result is read again."""
    if not shape.biases or not part.trained:
        return 0.0
    biased = _BIASED.get(shape.biases)
    return sum(one.m * one.n * e for one in products(shape, part) if not biased or one.name in biased)


def _score_passes(shape: Shape, part: Slice) -> tuple[list[Operation], list[Operation]]:
    """Return the passes of attention that keeps its scores.

    They are read and written, 2 e; in backward the gradient and what was kept, 3 e.
    """
    if part.backend not in ("eager", "math"):
        return [], []
    moved = part.tokens * part.seq_len * shape.heads * ELEMENT_BYTES[part.between]
    return (
        [Operation("softmax", "pointwise", part.dtype, 0, 2 * moved, 1, plain=True)],
        [Operation("softmax backward", "pointwise", part.dtype, 0, 3 * moved, 1, plain=True)],
    )


def _adapters(shape: Shape, part: Slice, *, backward: bool = False) -> Iterator[Operation]:
    """Yield LoRA beside each linear module: two small products, whose scaled sum is in the kernel that takes it.

    Forward reads the input (k), writes what B makes of it, reads it and writes the sum (3 n); backward reads the
    output's gradient twice (2 n) and the input, writes the input's and reads it (3 k).
    """
    if not part.lora_rank:
        return
    e = 4.0 if part.wide_adapters else ELEMENT_BYTES[part.dtype]
    for product in products(shape, part):
        if not has_adapter(product.name, part.adapted):
            continue
        moved = product.m * e * (3 * product.k + 2 * product.n if backward else product.k + 3 * product.n)
        flops = 2.0 * product.m * part.lora_rank * (product.k + product.n) * (2 if backward else 1)
        name = product.name + (" adapter backward" if backward else " adapter")
        yield Operation(name, "pointwise", part.dtype, flops, moved, 6 if backward else 4, plain=True)
