"""Casts of a layer: weights under autocast, dequantized weights, and operands of products in 8 or 4 bits."""

from collections.abc import Sequence
from typing import Final

from tonnage.timing.adapters import has_adapter
from tonnage.timing.operations import Operation, Product, Slice, kept_dtype
from tonnage.timing.shape import Shape


def weight_casts(
    shape: Shape, part: Slice, products: Sequence[Product], weights: float
) -> tuple[list[Operation], list[Operation]]:
    """Return the casts of weights under autocast (4 + 2 bytes each way), or dequantizing (0.5 + 2) in both passes."""
    modules = 4 + (3 if shape.parts > 1 else 0)
    if part.quantized:
        step = Operation("dequantize", "copy", part.dtype, 0, weights * 2.5, 2 * modules)
        around = _casts_around_products(part, products)
        return [step, *around], [step, *around]
    if not part.casts:
        return [], []
    cast = Operation("cast of weights", "copy", part.dtype, 0, weights * 6, modules)
    return [cast], [
        Operation("cast of gradients", "copy", part.dtype, 0, weights * 6, modules)
    ] if part.trained else []


def _casts_around_products(part: Slice, products: Sequence[Product]) -> list[Operation]:
    """Return the casts of inputs (6 k) and outputs (6 n) of products of 16 bits where all else is fp32, in one pass.

    bitsandbytes' 4-bit product multiplies in its own dtype and returns that of its input.  The casts that
    `adapters._beside_in_fp32` counts beside an adapter are these.
    """
    if not part.wide_between:
        return []
    alone = [one for one in products if not (part.wide_adapters and has_adapter(one.name, part.adapted))]
    moved = sum(6 * one.m * (one.k + one.n) for one in alone)
    return [Operation("casts around products", "copy", part.dtype, 0, moved, 2 * len(alone))] if alone else []


_AFTER_NORM: Final = ("qkv", "query", "key", "value", "query down", "latent down", "gate", "up")
"""Products whose operand a norm writes."""


def operand_casts(part: Slice, products: Sequence[Product]) -> tuple[list[Operation], list[Operation]]:
    """Return the casts of operands to 8 or 4 bits, forward and backward.

    Each operand is needed along rows for one product and along columns for another.  A kernel reads 2 bytes and
    writes both (4); a norm writes its own result narrow, which leaves a pass more for the columns (1).  Backward
    casts the gradient of each product's result.  Those of experts are cast one by one.  Eager code:
    `_cast_by_steps`.
    """
    if kept_dtype(part.dtype) == part.dtype:
        return [], []
    ahead, behind = [], []
    for product in products:
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
    """Return the cast of a product's operand as fused codes make it."""
    name = f"cast for {product.name}{suffix}"
    return Operation(name, "pointwise", part.dtype, 0, moved, kernels, grouped=product.of_experts)


def _cast_by_steps(product: Product, part: Slice, suffix: str, values: float, casts: int) -> Operation:
    """Return the cast as torchao's `matmul_with_hp_or_float8_args` makes it without torch.compile.

    Each value, and weights once a pass: its largest size (4 and 2 bytes), itself in fp32 (6), times the scale (8),
    clamped (8), narrow (5), in 6 kernels.  Backward casts results' gradients for either product, and operands and
    weights again.
    """
    values += product.matrices * product.k * product.n
    return Operation(f"cast for {product.name}{suffix}", "pointwise", part.dtype, 0, 33 * values, 6 * casts)
