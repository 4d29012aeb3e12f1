"""Operations of one Transformer layer, in eager or fused code.

    layer_operations(shape, Slice(tokens=4096, seq_len=4096)).forward

lists the linear modules of `products`, with adapters where they have them, then attention, the passes over memory and
the casts.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from tonnage.timing.adapters import adapter_operations, has_adapter
from tonnage.timing.attention import attention_operations
from tonnage.timing.casts import operand_casts, weight_casts
from tonnage.timing.operations import Operation, Passes, Product, Slice
from tonnage.timing.pointwise import pointwise_operations
from tonnage.timing.shape import Shape


@lru_cache(maxsize=4096)
def layer_operations(shape: Shape, part: Slice) -> Passes:
    """Return the operations of one layer."""
    modules = tuple(products(shape, part))
    forward: list[Operation] = []
    backward: list[Operation] = []
    for product in modules:
        merged = product.of_experts and not part.fused  # adapters of experts are applied to the experts' weights
        forward.append(_with_kernels(product, part, product.operation(part.dtype)))
        both = product.operation(part.dtype, " backward", 2 if part.trained or merged else 1)
        backward.append(_with_kernels(product, part, both))
        if part.lora_rank and has_adapter(product.name, part.adapted):
            forward += adapter_operations(product, part, merged=merged)
            backward += adapter_operations(product, part, merged=merged, backward=True)
    weights = layer_weights(shape, part)
    for ahead, behind in (
        attention_operations(shape, part),
        pointwise_operations(shape, part),
        weight_casts(shape, part, modules, weights),
        operand_casts(part, modules),
    ):
        forward += ahead
        backward += behind
    return Passes(_launched_by_host(forward, part), _launched_by_host(backward, part))


def _launched_by_host(operations: list[Operation], part: Slice) -> tuple[Operation, ...]:
    """Return the operations with the kernels that the host itself launches: a CUDA graph replays the others."""
    if part.captured == "none":
        return tuple(operations)
    return tuple(op if op.grouped and part.captured == "part" else replace(op, kernels=0) for op in operations)


def products(shape: Shape, part: Slice) -> Iterator[Product]:
    """Yield the linear modules of a layer."""
    T, t, h = part.tokens, part.tp, shape.hidden
    q, k = shape.query_width / t, max(shape.key_width / t, shape.head_dim)
    if shape.latent_rank:
        yield from _latent_products(shape, part)
    elif shape.parts == 1:
        yield Product("qkv", T, h, q + 2 * k)
    else:
        yield Product("query", T, h, q)
        yield Product("key", T, h, k)
        yield Product("value", T, h, k)
    yield Product("output", T, shape.heads * shape.value_dim / t, h)
    if not part.experts:
        yield from _feed_forward_products(shape, "", T, shape.intermediate / t)
        return
    yield Product("router", T, h, shape.experts)
    apart = t if part.experts_whole else 1  # then each rank has only its part of the tokens
    routed, width = T * shape.experts_per_token / apart, shape.expert_intermediate * apart / t
    yield from _feed_forward_products(shape, "expert ", routed, width, shape.experts / part.ep)
    if shape.shared_intermediate:
        yield from _feed_forward_products(shape, "shared ", T, shape.shared_intermediate / t)


def _feed_forward_products(shape: Shape, kind: str, m: float, width: float, experts: float = 0) -> Iterator[Product]:
    """Yield the products of a feed-forward network for m rows.

    `experts`: how many are on this rank, among which the rows are divided; 0: the network has none.
    """
    matrices, routed = max(experts, 1), experts > 0
    if shape.gated and shape.parts > 1 and not routed:
        yield Product(f"{kind}gate", m, shape.hidden, width)
        yield Product(f"{kind}up", m, shape.hidden, width)
    else:
        yield Product(f"{kind}up", m, shape.hidden, width * (2 if shape.gated else 1), matrices, routed)
    yield Product(f"{kind}down", m, width, shape.hidden, matrices, routed)


def _latent_products(shape: Shape, part: Slice) -> Iterator[Product]:
    """Yield the projections of latent attention (DeepSeek), which compress queries, keys and values."""
    T, t, h = part.tokens, part.tp, shape.hidden
    if shape.query_rank:
        yield Product("query down", T, h, shape.query_rank)
        yield Product("query up", T, shape.query_rank, shape.query_width / t)
    else:
        yield Product("query", T, h, shape.query_width / t)
    yield Product("latent down", T, h, shape.latent_rank + shape.rotary_dim)
    inner = shape.head_dim - shape.rotary_dim + shape.value_dim
    yield Product("latent up", T, shape.latent_rank, shape.heads * inner / t)


def _with_kernels(product: Product, part: Slice, operation: Operation) -> Operation:
    """Return a product with the kernels that it takes where it belongs to experts.

    Fused codes launch one kernel for each expert, unless one kernel does it all.  torch has one kernel for all
    experts, but none under autocast, where it multiplies expert by expert.
    """
    if not product.of_experts or part.experts_fused:
        return operation
    count = operation.products * round(product.matrices)
    if part.fused:
        return replace(operation, kernels=count, products=count)
    return replace(operation, kernels=count, products=count) if part.casts else operation


def layer_weights(shape: Shape, part: Slice) -> float:
    """Return the weights of the layer that this rank multiplies with."""
    if not part.experts:
        return shape.dense_layer_parameters / part.tp
    routed = shape.experts * shape.expert_parameters
    divided = part.ep * (1 if part.experts_whole else part.tp)
    return (shape.expert_layer_parameters - routed) / part.tp + routed / divided
