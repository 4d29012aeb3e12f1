"""Operations of the two ends of a network: the embedding, and the head with its loss."""

from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import Final

from tonnage.plans import CHUNK_TOKENS
from tonnage.timing.operations import ELEMENT_BYTES, Operation, Passes, Product, Slice
from tonnage.timing.pointwise import norm_operation
from tonnage.timing.shape import Shape


@lru_cache(maxsize=4096)
def embedding_operations(shape: Shape, part: Slice) -> Passes:
    """Return the lookup of words; backward sorts them and writes a dense gradient of all V rows."""
    r = part.residual_bytes
    stream = part.tokens * shape.hidden / (part.tp if part.sequence_parallel else 1)
    ahead = Operation("embedding", "embedding", part.dtype, 0, 2 * r * stream, 2)
    if not part.trained:
        return Passes((ahead,), ())
    dense = shape.embedding_parameters / part.tp * r
    return Passes((ahead,), (Operation("embedding backward", "embedding", part.dtype, 0, 3 * r * stream + dense, 8),))


IN_SLICES: Final = ("fused-slices", "torch", "liger", "liger-trainer")
"""Losses that compute their gradients in forward, slice by slice (techniques/fused_loss.py): in slices of
CHUNK_TOKENS, by torch's `linear_cross_entropy`, by Liger's kernel in a plain loop, and as trainers call it."""


@lru_cache(maxsize=4096)
def head_operations(shape: Shape, part: Slice, loss: str = "plain") -> Passes:
    """Return the final norm, the product with all words, and the loss.

    Bytes of the loss for each of T V logits: eager code casts to fp32 (e + 4) and takes the logarithm of the softmax
    (8), backward writes its gradient (12) and casts it (4 + e); codes with a loss divided by words do the softmax in
    steps (24 more, 6 more), which compiled are four (cast and maximum 6, exponentials 8, their division 8, gradient
    with its cast 6: Megatron-LM's fused_cross_entropy.py); in a network that Inductor compiled whole (`inductor`) two
    kernels, which take an H200 as long as 5.5 and 7 bytes a logit of 16 bits; a fused loss reads and writes logits
    once (2 e), Liger's reads them twice (3 e); a loss in slices as `_repeated_in_backward` says, in a trainer's own
    code (`sliced`) as the plain one, with the product once more, and IN_SLICES as `_product_of_slices` and
    `_passes_over_weights` say.
    """
    words = shape.vocab / part.tp
    product = Product("head", part.tokens, shape.hidden, words)
    dtype = part.between
    padded = loss == "inductor"  # which makes rows begin at multiples of 16 bytes (torch/_inductor, pad_mm)
    logits = part.tokens * words
    ahead, behind = _loss_bytes(part, loss)
    slices = _count_slices(shape, part, loss)
    forward, backward = product.operation(dtype), product.operation(dtype, " backward", 2 if part.trained else 1)
    again: list[Operation] = []
    if loss == "chunked":
        again = _repeated_in_backward(part, product, logits * ahead, slices)
    elif loss == "sliced":
        again = [product.operation(dtype, " again")]
    elif loss in IN_SLICES:
        forward, backward = (_product_of_slices(operation, product, slices) for operation in (forward, backward))
        again = _passes_over_weights(part, product, loss, slices)
    kernels = {"liger": 1, "liger-trainer": 1}.get(loss, 6) * slices
    norm = norm_operation(shape, part, part.tokens * shape.hidden / shape.norms, 0)
    return Passes(
        (norm, _align(forward, padded), Operation("loss", "loss", dtype, 0, logits * ahead, kernels)),
        (
            *again,
            _align(backward, padded),
            Operation("loss backward", "loss", dtype, 0, logits * behind, kernels),
        ),
    )


def _count_slices(shape: Shape, part: Slice, loss: str) -> int:
    """Return how many slices a loss takes one after the other."""
    if loss == "chunked" or loss in IN_SLICES:
        return ceil(part.tokens / slice_tokens(loss, part.tokens, part.tp, shape.vocab, shape.hidden))
    return 1 if loss == "plain" else 8


def slice_tokens(loss: str, tokens: float, tp: int, vocab: int, hidden: int) -> float:
    """Return the tokens of a slice of a loss in slices.

    torch and Liger cut micro-batches so that a slice has about as many logits as the micro-batch has hidden values,
    rounded up to a power of two; the others take CHUNK_TOKENS for each rank that shares the head.
    """
    if loss not in ("torch", "liger", "liger-trainer"):
        return min(tokens, CHUNK_TOKENS * tp)
    return min(1 << (ceil(tokens / ceil(vocab / hidden)) - 1).bit_length(), tokens)


def count_slices(tokens: int, tp: int) -> int:
    """Return how many slices the chunked loss takes one after the other."""
    return ceil(tokens / (CHUNK_TOKENS * tp))


def _product_of_slices(operation: Operation, product: Product, slices: int) -> Operation:
    """Return the head's product in slices, each of which reads, or writes, the whole weights."""
    count, e = operation.products, ELEMENT_BYTES[operation.dtype]
    moved = count * (slices - 1) * e * product.k * product.n
    return replace(operation, bytes=operation.bytes + moved, kernels=count * slices, products=count * slices)


def _passes_over_weights(part: Slice, product: Product, loss: str, slices: int) -> list[Operation]:
    """Return the passes over the head's weights, and their gradient, of a loss that is one of IN_SLICES.

    Each slice's part is added to the weights' gradient, which then is scaled (2 w of the gradient's w bytes): in an
    operation of its own (3 w, under autocast with a cast, e + w), or within the product, which reads what it adds to
    (w, and w - e more to write).  Where a trainer gives Liger the weights of a mixed precision, each slice casts them
    (4 + e); a plain loop casts them once.

    A step of a network of 1.2 billion parameters on an H200 takes 126.1 ms with slices of CHUNK_TOKENS, 128.5 ms with
    Liger's loss and 120.3 to 122.6 ms with the plain one (measurements/h200-2026-11-26.jsonl, `loss-fused`).
    """
    dtype, e = part.between, ELEMENT_BYTES[part.between]
    stored = 4 if part.casts else e
    w = {"torch": 4, "liger": e}.get(loss, stored)
    each = 0.0
    if part.trained:
        each = 3 * w + (e + w) * part.casts if loss == "fused-slices" else 2 * w - e
    if loss == "liger-trainer":
        each += (4 + e) * part.casts
    moved = product.k * product.n * (each * slices + 2 * w * part.trained)
    return [Operation("head gradient summed", "pointwise", dtype, 0, moved, 2 * slices)] if moved else []


def _repeated_in_backward(part: Slice, product: Product, loss_bytes: float, slices: int) -> list[Operation]:
    """Return the additional operations that a loss in slices makes in backward.

    Product and loss run once more; where the head is trained, each slice's part is added to the head's gradient
    (3 e); under autocast each slice casts the head's weights (4 + e).

    In a step of four slices on an H200 the kernels of the loss's forward ran eight times, and each sum took 0.36 ms,
    these bytes at 4.4 TB/s (measurements/h200-2026-11-26b.events.jsonl, `loss-chunked`).
    """
    dtype, e = part.between, ELEMENT_BYTES[part.between]
    weights = product.k * product.n
    repeated = [product.operation(dtype, " again"), Operation("loss again", "loss", dtype, 0, loss_bytes, 6 * slices)]
    if part.trained and slices > 1:
        added = 3 * e * weights * (slices - 1)
        repeated.append(Operation("head gradient summed", "pointwise", dtype, 0, added, slices - 1))
    if part.casts:
        repeated.append(Operation("head cast again", "copy", dtype, 0, (4 + e) * weights * slices, slices))
    return repeated


def _align(operation: Operation, padded: bool) -> Operation:
    """Return the operation, aligned where its rows are padded."""
    return replace(operation, aligned=True) if padded else operation


def _loss_bytes(part: Slice, loss: str) -> tuple[float, float]:
    """Return the bytes that the loss moves for each logit, forward and backward; see `head_operations`.

    Slices whose words are divided among ranks (techniques/vocabulary.py) look for the highest (e), cast (e + 4),
    subtract it (8), make exponentials (8) and add them up (4); backward multiplies (8) and casts (4 + e).
    """
    e = ELEMENT_BYTES[part.between]
    if loss == "fused":
        return 2 * e, 0
    if loss in ("liger", "liger-trainer"):
        return 3 * e, 0
    if loss == "compiled":
        return 22, 6
    if loss == "inductor":
        return 5.5, 7
    if loss == "chunked" and part.tp > 1:
        return 24 + 2 * e, 12 + e
    return (36 + e, 22 + e) if part.fused else (12 + e, 16 + e)
