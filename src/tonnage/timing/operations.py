"""The operations of one layer, of the embedding and of the head, as one rank runs them for one micro-batch.

Each has its floating-point operations, the bytes it must move, and the kernels that a host launches for it (of
eager code as the ghost's log counts them).  What a
pass over a tensor moves follows from what the code does: eager code reads and writes a tensor for each line of
Python, fused kernels once for all of them.  Letters: costs/shape.py; e bytes of an element of the computation, r
bytes of one of the residual stream (4 under autocast, where it stays fp32).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Final

from tonnage.plans import CHUNK_TOKENS
from tonnage.timing.adapted import has_adapter
from tonnage.timing.shape import Shape

ELEMENT_BYTES: Final[dict[str, float]] = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp4": 0.5}


def kept_dtype(dtype: str) -> str:
    """What activations have beside products of this dtype: only the operands of products are narrower than 16
    bits."""
    return "bf16" if dtype in ("fp8", "fp4") else dtype


FAMILIES: Final = ("matmul", "attention", "softmax", "pointwise", "norm", "loss", "embedding", "optimizer", "copy")


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation, or several alike, of one rank."""

    name: str
    """What it is in the network."""
    family: str
    """One of FAMILIES: what decides its rate."""
    dtype: str
    """Of its operands."""
    flops: float
    """Multiplications and additions."""
    bytes: float
    """What it must read and write."""
    kernels: float = 1
    """Kernels that the host launches for it."""
    aligned: bool = True
    """Of matmul: whether rows begin at multiples of 16 bytes, without which tensor cores are fed far more slowly."""
    batched: bool = False
    """Of matmul: whether it is one of each head, whose matrices begin where a head does."""
    products: int = 1
    """Of matmul and attention: products one after the other, each of which fills and drains the card."""
    grouped: bool = False
    """Of matmul: whether it is of experts: several products side by side, or one of tokens that were handed over."""
    plain: bool = False
    """Of passes over memory: whether each is over whole rows of one dtype, which any code makes as fast as the memory
    is."""


@dataclass(frozen=True, kw_only=True)
class Slice:
    """The part of a layer's work that one rank does for one micro-batch, and with what code."""

    tokens: int
    """Tokens T of the micro-batch on this rank, after context parallelism."""
    seq_len: int
    """Tokens that may see each other."""
    tp: int = 1
    """Ranks that share each matrix."""
    ep: int = 1
    """Ranks that share the experts."""
    sequence_parallel: bool = False
    """Whether norms and residuals see T/t tokens."""
    dtype: str = "bf16"
    """Of matrix products."""
    residual_bytes: int = 2
    """Of an element of the residual stream."""
    fused: bool = False
    """Whether norms, rotations, activations and dropout are one kernel each."""
    backend: str = "flash"
    """The attention: `flash`, `cudnn`, `efficient`, `math`, or `eager`."""
    trained: bool = True
    """Whether the layer's weights get gradients."""
    casts: bool = False
    """Whether weights are cast to the dtype of the products in each forward pass (autocast)."""
    lora_rank: int = 0
    """Rank of adapters; 0: none."""
    adapted: frozenset[str] | None = None
    """Products that have them; None: all."""
    wide_adapters: bool = False
    """Whether they are fp32 and no autocast makes them narrower: inputs are cast to fp32 and multiplied in it."""
    quantized: bool = False
    """Whether frozen weights are dequantized (4 bits) each time they are used."""
    wide_between: bool = False
    """Whether what is between a layer's products, and the head, are fp32: products cast what they get and return."""
    experts: bool = False
    """Whether this layer has experts, where the network has."""
    captured: str = "none"
    """Launches that a CUDA graph replays: `none`, `part` (all but those of its experts' products) or `all`."""
    experts_fused: bool = False
    """Whether experts' products, their activation and casts are one kernel."""
    experts_whole: bool = False
    """Whether tensor-parallel ranks have experts of their own, rather than parts of each."""
    compiled: bool = False
    """Whether Inductor made kernels of the layer (costs/compiled.py)."""
    masked: bool = False
    """Whether attention is given a mask, and so computes what it hides."""

    @property
    def between(self) -> str:
        """The dtype of attention, of the head, and of what layers pass over memory."""
        return "fp32" if self.wide_between else kept_dtype(self.dtype)


@dataclass(frozen=True, slots=True)
class Passes:
    """Operations of a part of the network, one after the other."""

    forward: tuple[Operation, ...]
    """Of the forward pass."""
    backward: tuple[Operation, ...]
    """Of the backward pass."""

    @property
    def flops(self) -> float:
        """Operations of both passes."""
        return sum(op.flops for op in (*self.forward, *self.backward))


@dataclass(frozen=True, slots=True)
class Product:
    """A linear module: m rows times a matrix of k by n, of which this rank has its part."""

    name: str
    m: float
    k: float
    n: float
    matrices: float = 1
    """Matrices of k by n among which the rows are divided: those of experts."""
    of_experts: bool = False
    """Whether it is of experts, even if there is but one on this rank."""

    def operation(self, dtype: str, suffix: str = "", count: int = 1) -> Operation:
        """The product itself; both products of the backward pass have the same cost."""
        e = ELEMENT_BYTES[dtype]
        moved = e * (self.m * self.k + self.m * self.n + self.matrices * self.k * self.n)
        flops = 2.0 * self.m * self.k * self.n
        aligned = self.n * e % 16 == 0 and self.k * e % 16 == 0
        return Operation(
            self.name + suffix,
            "matmul",
            dtype,
            count * flops,
            count * moved,
            count,
            aligned,
            products=count,
            grouped=self.of_experts,
        )


@lru_cache(maxsize=4096)
def layer(shape: Shape, part: Slice) -> Passes:
    """One layer's operations."""
    forward: list[Operation] = []
    backward: list[Operation] = []
    for product in products(shape, part):
        whole = product.of_experts and not part.fused  # how adapters of experts are applied: to their weights
        forward.append(_looped(product, part, product.operation(part.dtype)))
        both = product.operation(part.dtype, " backward", 2 if part.trained or whole else 1)
        backward.append(_looped(product, part, both))
        if part.lora_rank and has_adapter(product.name, part.adapted):
            adapter = _expert_adapter if whole else _wide_adapter if part.wide_adapters else _adapter
            forward += adapter(product, part)
            backward += adapter(product, part, backward=True)
    for others in (_attention, _pointwise, _weights, _casts):
        ahead, behind = others(shape, part)
        forward += ahead
        backward += behind
    return Passes(_launched(forward, part), _launched(backward, part))


def _launched(operations: list[Operation], part: Slice) -> tuple[Operation, ...]:
    """The operations with the kernels that the host itself launches."""
    if part.captured == "none":
        return tuple(operations)
    return tuple(op if op.grouped and part.captured == "part" else replace(op, kernels=0) for op in operations)


def products(shape: Shape, part: Slice) -> Iterator[Product]:
    """The linear modules of a layer."""
    T, t, h = part.tokens, part.tp, shape.hidden
    q, k = shape.query_width / t, max(shape.key_width / t, shape.head_dim)
    if shape.latent_rank:
        yield from _latent(shape, part)
    elif shape.parts == 1:
        yield Product("qkv", T, h, q + 2 * k)
    else:
        yield Product("query", T, h, q)
        yield Product("key", T, h, k)
        yield Product("value", T, h, k)
    yield Product("output", T, shape.heads * shape.value_dim / t, h)
    if not part.experts:
        yield from _feed_forward(shape, "", T, shape.intermediate / t)
        return
    yield Product("router", T, h, shape.experts)
    apart = t if part.experts_whole else 1  # then each has but its part of the tokens
    routed, width = T * shape.experts_per_token / apart, shape.expert_intermediate * apart / t
    yield from _feed_forward(shape, "expert ", routed, width, shape.experts / part.ep)
    if shape.shared_intermediate:
        yield from _feed_forward(shape, "shared ", T, shape.shared_intermediate / t)


def _feed_forward(shape: Shape, kind: str, m: float, width: float, experts: float = 0) -> Iterator[Product]:
    """Of all tokens, or where there are `experts` on this rank, of those that were handed to them."""
    matrices, routed = max(experts, 1), experts > 0
    if shape.gated and shape.parts > 1 and not routed:
        yield Product(f"{kind}gate", m, shape.hidden, width)
        yield Product(f"{kind}up", m, shape.hidden, width)
    else:
        yield Product(f"{kind}up", m, shape.hidden, width * (2 if shape.gated else 1), matrices, routed)
    yield Product(f"{kind}down", m, width, shape.hidden, matrices, routed)


def _latent(shape: Shape, part: Slice) -> Iterator[Product]:
    T, t, h = part.tokens, part.tp, shape.hidden
    if shape.query_rank:
        yield Product("query down", T, h, shape.query_rank)
        yield Product("query up", T, shape.query_rank, shape.query_width / t)
    else:
        yield Product("query", T, h, shape.query_width / t)
    yield Product("latent down", T, h, shape.latent_rank + shape.rotary_dim)
    inner = shape.head_dim - shape.rotary_dim + shape.value_dim
    yield Product("latent up", T, shape.latent_rank, shape.heads * inner / t)


def _looped(product: Product, part: Slice, operation: Operation) -> Operation:
    """A product with the kernels that it takes where it is of experts.

    Fused codes launch one for each expert, unless one kernel does it all.  torch has one for all of them, but none
    under autocast, where it multiplies expert by expert.
    """
    if not product.of_experts or part.experts_fused:
        return operation
    count = operation.products * round(product.matrices)
    if part.fused:
        return replace(operation, kernels=count, products=count)
    return replace(operation, kernels=count, products=count) if part.casts else operation


def _expert_adapter(product: Product, part: Slice, *, backward: bool = False) -> list[Operation]:
    """LoRA on the experts of a layer as PEFT applies it: W + B A is made of whole matrices, twice in a forward pass
    (each time W is read and the sum written), and backward reads the gradient of W for A and for B and writes it."""
    moved = product.matrices * product.k * product.n * ELEMENT_BYTES[part.dtype] * (3 if backward else 4)
    name = product.name + (" adapter backward" if backward else " adapter")
    return [Operation(name, "pointwise", part.dtype, 0, moved, 8)]


def _adapter(product: Product, part: Slice, *, backward: bool = False) -> list[Operation]:
    """LoRA beside a linear module: A, B, and their scaled sum (3 kernels, 4 backward); under autocast two casts more.

    Forward reads the input (k), and writes, scales (2) and adds (3) the output (n); backward reads the input's and
    the output's gradients twice, adds to the input's (3).  Under autocast the input is fp32 and is cast once more
    (6 bytes), its gradient is cast back, and added in fp32 (12).
    """
    e, r, casts = ELEMENT_BYTES[part.dtype], part.lora_rank, part.residual_bytes == 4
    moved = product.m * e * (4 * product.k + 3 * product.n if backward else product.k + 6 * product.n)
    moved += product.m * product.k * (12 if backward else 6) * casts
    flops = 2.0 * product.m * r * (product.k + product.n) * (2 if backward else 1)
    name = product.name + (" adapter backward" if backward else " adapter")
    kernels = (4 if backward else 3) + 2 * casts
    return [Operation(name, "pointwise", part.dtype, flops, moved, kernels, plain=True)]


def _wide_adapter(product: Product, part: Slice, *, backward: bool = False) -> list[Operation]:
    """The same in fp32, outside tensor cores, beside a module in 16 bits.

    Forward casts the input (6 k) and reads it (4), writes, scales and adds the output (4 + 8 + 10 n), casts the sum
    (6 n); backward casts the output's gradient (6 n), scales it (8) and reads it twice (8), reads the input (4 k),
    writes its gradient (4), casts it (6) and adds it (6).
    """
    moved = product.m * (20 * product.k + 22 * product.n if backward else 10 * product.k + 28 * product.n)
    flops = 2.0 * product.m * part.lora_rank * (product.k + product.n) * (2 if backward else 1)
    name = product.name + (" adapter backward" if backward else " adapter")
    return [
        Operation(name, "pointwise", "fp32", 0, moved, 4 if backward else 5, plain=True),
        Operation(
            f"{name} products", "matmul", "fp32", flops, 0, 4 if backward else 2, products=4 if backward else 2
        ),
    ]


def seen_tokens(shape: Shape, seq_len: int) -> float:
    """Keys that a query is multiplied with on average, over layers with and without a window."""
    every = seq_len / 2 if shape.causal else float(seq_len)
    if shape.window is None or shape.window >= seq_len:
        return every
    windowed = shape.window - shape.window**2 / (2 * seq_len)
    return shape.window_fraction * windowed + (1 - shape.window_fraction) * every


_UNMASKED: Final = (1.0, 1.0)
MASKED: Final = {"cudnn": (2.6, 2.15), "efficient": (1.8, 1.5)}
"""Seconds of attention, forward and backward, that is given a causal mask / of attention that knows it is causal: our
H200's and H100's `op sdpa` in measurements, over 2,048 tokens."""


def _attention(shape: Shape, part: Slice) -> tuple[list[Operation], list[Operation]]:
    """Scores, softmax and their product with the values; backward has five products where forward has two.

    Kernels that keep no scores skip what the mask hides; others compute it, and move b heads s^2 scores: fused code
    as `_fused_scores` says.  Eager code scales, masks, casts and takes a softmax in fp32: 15 bytes forward and 21
    backward; under autocast, where the mask's fp32 makes scores fp32, 25 and 37: what an H200 took for gpt2-medium
    and llama-3.2-1b more than with flash attention, at the rate of eager code's other passes.  Dropout reads, writes
    and keeps a mask of one byte, in either pass.  torch's formula ("math") multiplies in fp32 too.
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
    products = "fp32" if wide else dtype
    aligned = shape.head_dim * e % 16 == 0 and shape.value_dim * e % 16 == 0
    forward = Operation("attention", "matmul", products, flops, kept, 2, aligned, True, 2)
    backward = Operation("attention backward", "matmul", products, 2 * flops, 2 * kept, 4, aligned, True, 4)
    if part.fused:
        return [forward, *_fused_scores(shape, scores)], [backward, *_fused_scores(shape, scores, backward=True)]
    dropped, launched = (2 * e + 1, 8) if shape.dropout else (0, 7)
    return (
        [forward, Operation("softmax", "pointwise", dtype, 0, scores * (ahead + dropped), launched)],
        [backward, Operation("softmax backward", "pointwise", dtype, 0, scores * (behind + dropped), launched)],
    )


_SOFTMAX_FLOPS: Final = 88
"""Of Megatron's fused softmax for each score in either pass, at the card's fp32 peak: 4.5 ps on an A100, whose memory
would take 2.3; A10G, L4 and V100 take what their memory takes (Aceso's operator times, `enc-attention-softmax`)."""


def _fused_scores(shape: Shape, scores: float, *, backward: bool = False) -> list[Operation]:
    """What fused codes do with scores of 16 bits besides products.

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


def _pointwise(shape: Shape, part: Slice) -> tuple[list[Operation], list[Operation]]:
    """Norms, residuals, rotations, activations and dropout, by what is read and written for each element."""
    e, r = ELEMENT_BYTES[part.between], part.residual_bytes
    stream = part.tokens / (part.tp if part.sequence_parallel else 1) * shape.hidden
    rotated = part.tokens * (shape.query_width + shape.key_width) / part.tp * shape.rotary
    turned, turned_back = (2 * e, 2 * e) if part.fused else (12 * e, 14 * e)
    active = part.tokens * inner_width(shape, part) / part.tp * _active(shape, part, e)
    added = stream * 6 * r + _dropped(shape, stream, r)

    def passing(name: str, moved: float, kernels: int) -> Operation:
        return Operation(name, "pointwise", part.dtype, 0, moved, kernels)

    return (
        [
            _norm(shape, part, stream, rotated),
            passing("residual", added, 2),
            passing("rotation", rotated * turned, _few(part, 8)),
            passing("activation", active, _few(part, 2)),
            *_routing(shape, part, 1),
            *_around_experts(shape, part),
        ],
        [
            _norm(shape, part, stream, rotated, backward=True),
            passing("residual backward", added, 4),
            passing("rotation backward", rotated * turned_back, _few(part, 16)),
            passing("activation backward", 2 * active, _few(part, 4)),
            *_routing(shape, part, 2),
            *_around_experts(shape, part, backward=True),
        ],
    )


def _few(part: Slice, kernels: int) -> int:
    return 1 if part.fused else kernels


def inner_width(shape: Shape, part: Slice) -> int:
    """Values of a token inside the feed-forward network, or inside all experts that it goes through."""
    if not part.experts:
        return shape.intermediate
    return shape.experts_per_token * shape.expert_intermediate + shape.shared_intermediate


def _active(shape: Shape, part: Slice, e: float) -> float:
    """Bytes of an activation for each inner value: SiLU (2 e) and the gate's product (3 e), or GELU (2 e).

    Written out, GELU's tanh formula is eight kernels (18 e); autocast runs the power and what follows in fp32 (60).
    A squared ReLU is written out in fused codes too (torch.pow(relu(x), 2), which NeMo does not compile): 4 e, and in
    backward 10 e.
    """
    if shape.squared_activation:
        return 14 / 3 * e  # over three passes, of which backward has two
    if not shape.gated:
        written_out = 60 if part.residual_bytes > e else 18 * e
        return written_out if shape.stepwise_activation and not part.fused else 2 * e
    return 3 * e if part.fused else 5 * e


def _dropped(shape: Shape, stream: float, r: int) -> float:
    """Two dropouts: read, written, and a mask of one byte."""
    return 2 * stream * (2 * r + 1) if shape.dropout else 0.0


def _norm(shape: Shape, part: Slice, stream: float, rotated: float, *, backward: bool = False) -> Operation:
    """All norms of a layer.

    Fused: forward reads and writes, backward reads two and writes one.  A root-mean-square norm in eager code is
    a cast, a square, a mean, a product, a cast back and the weight: r + 30 bytes forward, r + 50 backward.
    """
    r = part.residual_bytes
    if part.fused or not shape.rms_norm:
        each, kernels = (3 * r, 2) if backward else (2 * r, 1)
    else:
        each, kernels = (r + 50, 12) if backward else (r + 30, 6)
    elements = shape.norms * stream + (rotated if shape.head_norms else 0)
    count = kernels * (shape.norms + (2 if shape.head_norms else 0))
    return Operation("norms backward" if backward else "norms", "norm", part.dtype, 0, elements * each, count)


def _routing(shape: Shape, part: Slice, passes: int) -> list[Operation]:
    """Of layers with experts: tokens are gathered by expert and added up again (each k times), a sort between."""
    if not part.experts:
        return []
    e = ELEMENT_BYTES[part.between]
    moved = part.tokens * shape.experts_per_token * shape.hidden * 4 * e / (part.tp if part.experts_whole else 1)
    return [Operation("routing", "pointwise", part.dtype, 0, passes * moved, 24 * passes)]


def _around_experts(shape: Shape, part: Slice, *, backward: bool = False) -> list[Operation]:
    """What Megatron's grouped experts compute in plain torch, unless one kernel does it all.

    Clamping both halves and putting them together: 16 bytes an inner value, 20 backward.  Adding the last product's
    bias times the router's weights, expert by expert, in fp32: 28 bytes a value, 40 backward.  (Megatron-LM
    core_v0.16.0, `weighted_bias_quick_geglu_impl` and `TEGroupedMLP._apply_bias`.)
    """
    if not (part.fused and part.experts) or part.experts_fused:
        return []
    rows = part.tokens * shape.experts_per_token / (part.tp if part.experts_whole else 1)
    suffix = " backward" if backward else ""
    found: list[Operation] = []
    if shape.clamped_activation:
        moved = rows * shape.expert_intermediate * (20 if backward else 16)
        found.append(Operation("clamp" + suffix, "pointwise", part.dtype, 0, moved, 6 if backward else 3))
    if shape.expert_biases:
        moved, count = rows * shape.hidden * (40 if backward else 28), round(shape.experts / part.ep)
        kernels = count * (6 if backward else 3)
        found.append(Operation("expert biases" + suffix, "pointwise", part.dtype, 0, moved, kernels, grouped=True))
    return found


def layer_weights(shape: Shape, part: Slice) -> float:
    """Weights of the layer that this rank multiplies with."""
    if not part.experts:
        return shape.dense_layer_parameters / part.tp
    routed = shape.experts * shape.expert_parameters
    divided = part.ep * (1 if part.experts_whole else part.tp)
    return (shape.expert_layer_parameters - routed) / part.tp + routed / divided


def _weights(shape: Shape, part: Slice) -> tuple[list[Operation], list[Operation]]:
    """Casts of weights under autocast (4 + 2 bytes each way), and dequantizing (0.5 + 2 bytes) in both passes."""
    weights = layer_weights(shape, part)
    modules = 4 + (3 if shape.parts > 1 else 0)
    if part.quantized:
        step = Operation("dequantize", "copy", part.dtype, 0, weights * 2.5, 2 * modules)
        around = _around_products(shape, part)
        return [step, *around], [step, *around]
    if not part.casts:
        return [], []
    cast = Operation("cast of weights", "copy", part.dtype, 0, weights * 6, modules)
    return [cast], [
        Operation("cast of gradients", "copy", part.dtype, 0, weights * 6, modules)
    ] if part.trained else []


def _around_products(shape: Shape, part: Slice) -> list[Operation]:
    """Casts of what products of 16 bits get (6 k) and return (6 n) where all else is fp32, as much in either pass.

    bitsandbytes' 4-bit product multiplies in its own dtype and returns that of its input; what `_wide_adapter` counts
    as casts beside an adapter is these.
    """
    if not part.wide_between:
        return []
    alone = [one for one in products(shape, part) if not (part.wide_adapters and has_adapter(one.name, part.adapted))]
    moved = sum(6 * one.m * (one.k + one.n) for one in alone)
    return [Operation("casts around products", "copy", part.dtype, 0, moved, 2 * len(alone))] if alone else []


_AFTER_NORM: Final = ("qkv", "query", "key", "value", "query down", "latent down", "gate", "up")
"""Products whose operand a norm writes."""


def _casts(shape: Shape, part: Slice) -> tuple[list[Operation], list[Operation]]:
    """Casts of operands to 8 or 4 bits; each is needed along rows for one product and along columns for another.

    A kernel reads 2 bytes and writes both (4); a norm writes its own result narrow, which leaves a pass more for the
    columns (1).  Backward casts the gradient of each product's result.  Those of experts are cast one by one.
    Eager code: `_cast_by_steps`.
    """
    if kept_dtype(part.dtype) == part.dtype:
        return [], []
    ahead, behind = [], []
    for product in products(shape, part):
        if not part.fused:
            ahead.append(_cast_by_steps(product, part, "", product.m * product.k, 2))
            behind.append(_cast_by_steps(product, part, " backward", product.m * (product.k + 2 * product.n), 4))
            continue
        if product.of_experts and part.experts_fused:
            continue
        read = product.m * product.k * (1 if product.name in _AFTER_NORM else 4)
        count = round(product.matrices) if product.of_experts else 1
        ahead.append(_cast(product, part, "", read, count))
        behind.append(_cast(product, part, " backward", product.m * product.n * 4, count))
    return ahead, behind


def _cast(product: Product, part: Slice, suffix: str, moved: float, kernels: int) -> Operation:
    name = f"cast for {product.name}{suffix}"
    return Operation(name, "pointwise", part.dtype, 0, moved, kernels, grouped=product.of_experts)


def _cast_by_steps(product: Product, part: Slice, suffix: str, values: float, casts: int) -> Operation:
    """As torchao's `matmul_with_hp_or_float8_args` casts without torch.compile: each value, and weights once a pass.

    Its largest size (4 and 2 bytes), itself in fp32 (6), times the scale (8), clamped (8), narrow (5), in 6 kernels.
    Backward casts results' gradients for either product, and operands and weights again.
    """
    values += product.matrices * product.k * product.n
    return Operation(f"cast for {product.name}{suffix}", "pointwise", part.dtype, 0, 33 * values, 6 * casts)


@lru_cache(maxsize=4096)
def embedding(shape: Shape, part: Slice) -> Passes:
    """Looking words up; backward sorts them and writes a dense gradient of all V rows."""
    r = part.residual_bytes
    stream = part.tokens * shape.hidden / (part.tp if part.sequence_parallel else 1)
    ahead = Operation("embedding", "embedding", part.dtype, 0, 2 * r * stream, 2)
    if not part.trained:
        return Passes((ahead,), ())
    dense = shape.embedding_parameters / part.tp * r
    return Passes((ahead,), (Operation("embedding backward", "embedding", part.dtype, 0, 3 * r * stream + dense, 8),))


@lru_cache(maxsize=4096)
def head(shape: Shape, part: Slice, loss: str = "plain") -> Passes:
    """The final norm, the product with all words, and the loss.

    Bytes of the loss for each of T V logits: eager code casts to fp32 (e + 4) and takes the logarithm of the softmax
    (8), backward writes its gradient (12) and casts it (4 + e); codes with a loss divided by words do the softmax in
    steps (24 more, 6 more), which compiled are four (cast and maximum 6, exponentials 8, their division 8, gradient
    with its cast 6: Megatron-LM's fused_cross_entropy.py); in a network that Inductor compiled whole (`inductor`) two
    kernels, which take an H200 as long as 5.5 and 7 bytes a logit of 16 bits; a fused loss reads and writes logits
    once (2 e); in slices as `_again` says, in a trainer's own (`sliced`) as the plain one, with the product once
    more.
    """
    words = shape.vocab / part.tp
    product = Product("head", part.tokens, shape.hidden, words)
    dtype = part.between
    padded = loss == "inductor"  # which makes rows begin at multiples of 16 bytes (torch/_inductor, pad_mm)
    logits = part.tokens * words
    ahead, behind = _loss_bytes(part, loss)
    slices = slices_of(part.tokens, part.tp) if loss == "chunked" else 8 if loss != "plain" else 1
    again = _again(part, product, logits * ahead, slices) if loss == "chunked" else []
    if loss == "sliced":
        again = [product.operation(dtype, " again")]
    norm = _norm(shape, part, part.tokens * shape.hidden / shape.norms, 0)
    return Passes(
        (
            norm,
            _padded(product.operation(dtype), padded),
            Operation("loss", "loss", dtype, 0, logits * ahead, 6 * slices),
        ),
        (
            *again,
            _padded(product.operation(dtype, " backward", 2 if part.trained else 1), padded),
            Operation("loss backward", "loss", dtype, 0, logits * behind, 6 * slices),
        ),
    )


def slices_of(tokens: int, tp: int) -> int:
    """How many slices tonnage's loss takes one after the other."""
    return ceil(tokens / (CHUNK_TOKENS * tp))


def _again(part: Slice, product: Product, loss_bytes: float, slices: int) -> list[Operation]:
    """What a loss in slices makes in backward besides: product and loss once more, and where the head is trained the
    sum of what each slice adds to its gradient (3 e); under autocast each slice casts the head's weights (4 + e).

    In a step of four slices on an H200 the kernels of the loss's forward ran eight times, and each sum took 0.36 ms,
    these bytes at 4.4 TB/s (measurements/h200-2026-11-26b.events.jsonl, `loss-chunked`).
    """
    dtype, e = part.between, ELEMENT_BYTES[part.between]
    weights = product.k * product.n
    found = [product.operation(dtype, " again"), Operation("loss again", "loss", dtype, 0, loss_bytes, 6 * slices)]
    if part.trained and slices > 1:
        added = 3 * e * weights * (slices - 1)
        found.append(Operation("head gradient summed", "pointwise", dtype, 0, added, slices - 1))
    if part.casts:
        found.append(Operation("head cast again", "copy", dtype, 0, (4 + e) * weights * slices, slices))
    return found


def _padded(operation: Operation, padded: bool) -> Operation:
    return replace(operation, aligned=True) if padded else operation


def _loss_bytes(part: Slice, loss: str) -> tuple[float, float]:
    """What the loss moves for each logit, forward and backward; see `head`.

    Slices whose words are divided among ranks (techniques/vocabulary.py) look for the highest (e), cast (e + 4),
    subtract it (8), make exponentials (8) and add them up (4); backward multiplies (8) and casts (4 + e).
    """
    e = ELEMENT_BYTES[part.between]
    if loss == "fused":
        return 2 * e, 0
    if loss == "compiled":
        return 22, 6
    if loss == "inductor":
        return 5.5, 7
    if loss == "chunked" and part.tp > 1:
        return 24 + 2 * e, 12 + e
    return (36 + e, 22 + e) if part.fused else (12 + e, 16 + e)
