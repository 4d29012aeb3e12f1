"""LoRA adapters: which linear modules of a layer have one, and what an adapter computes in eager code.

Modules are named as `layer.products` names them: `adapted_products(("q_proj", "v_proj"))` is `{"query", "value"}`.
"""

from collections.abc import Iterable
from typing import Final

from tonnage.timing.operations import ELEMENT_BYTES, Operation, Product, Slice

_OF_MODULES: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("q_proj", "q", "query", "wq", "q_lin"), ("query",)),
    **dict.fromkeys(("k_proj", "k", "key", "wk", "k_lin"), ("key",)),
    **dict.fromkeys(("v_proj", "v", "value", "wv", "v_lin"), ("value",)),
    **dict.fromkeys(("o_proj", "out_proj", "o", "wo", "out_lin"), ("output",)),
    **dict.fromkeys(("qkv_proj", "c_attn", "query_key_value", "wqkv"), ("query", "key", "value")),
    **dict.fromkeys(("gate_proj", "w1", "wi_0"), ("gate",)),
    **dict.fromkeys(("up_proj", "w3", "wi_1", "fc1", "c_fc", "dense_h_to_4h", "fc_in"), ("up",)),
    **dict.fromkeys(("down_proj", "w2", "fc2", "dense_4h_to_h", "fc_out"), ("down",)),
    "gate_up_proj": ("gate", "up"),
    "q_a_proj": ("query down",),
    "q_b_proj": ("query up",),
    "kv_a_proj_with_mqa": ("latent down",),
    "kv_b_proj": ("latent up",),
}
"""Products by the names that transformers gives to modules.  Names that mean different modules in different networks
(`dense`, `c_proj`) are left out."""

_MERGED: Final = {"qkv": ("query", "key", "value"), "up": ("gate", "up")}
"""Products that some networks have in place of several."""


def adapted_products(targets: Iterable[str]) -> frozenset[str] | None:
    """Return the products that these target modules are; None for all, also where a name is not known."""
    adapted: set[str] = set()
    for target in targets:
        products = _OF_MODULES.get(target.rpartition(".")[2].lower())
        if products is None:
            return None
        adapted.update(products)
    return frozenset(adapted)


def has_adapter(product: str, among: frozenset[str] | None) -> bool:
    """Return True if a product (also of experts: `expert up`) has an adapter.

    A product in place of several has one if any of these has.
    """
    if among is None:
        return True
    name = product.removeprefix("expert ").removeprefix("shared ")
    return name in among or not among.isdisjoint(_MERGED.get(name, ()))


def adapter_operations(product: Product, part: Slice, *, merged: bool, backward: bool = False) -> list[Operation]:
    """Return the operations of the adapter of one product, in one pass.

    `merged`: the adapter is added to the weights, as PEFT does for experts, instead of running beside the module.
    """
    name = product.name + (" adapter backward" if backward else " adapter")
    if merged:
        return _added_to_experts(name, product, part, backward)
    if part.wide_adapters:
        return _beside_in_fp32(name, product, part, backward)
    return _beside(name, product, part, backward)


def _added_to_experts(name: str, product: Product, part: Slice, backward: bool) -> list[Operation]:
    """Return LoRA on the experts of a layer as PEFT applies it.

    W + B A is made of whole matrices, twice in a forward pass (each time W is read and the sum written), and backward
    reads the gradient of W for A and for B and writes it.
    """
    moved = product.matrices * product.k * product.n * ELEMENT_BYTES[part.dtype] * (3 if backward else 4)
    return [Operation(name, "pointwise", part.dtype, 0, moved, 8)]


def _beside(name: str, product: Product, part: Slice, backward: bool) -> list[Operation]:
    """Return LoRA beside a linear module: A, B, and their scaled sum (3 kernels, 4 backward).

    Forward reads the input (k), and writes, scales (2) and adds (3) the output (n); backward reads the input's and
    the output's gradients twice, adds to the input's (3).  Under autocast the input is fp32 and is cast once more
    (6 bytes), its gradient is cast back, and added in fp32 (12): two more kernels.
    """
    e, r, casts = ELEMENT_BYTES[part.dtype], part.lora_rank, part.residual_bytes == 4
    moved = product.m * e * (4 * product.k + 3 * product.n if backward else product.k + 6 * product.n)
    moved += product.m * product.k * (12 if backward else 6) * casts
    flops = 2.0 * product.m * r * (product.k + product.n) * (2 if backward else 1)
    kernels = (4 if backward else 3) + 2 * casts
    return [Operation(name, "pointwise", part.dtype, flops, moved, kernels, plain=True)]


def _beside_in_fp32(name: str, product: Product, part: Slice, backward: bool) -> list[Operation]:
    """Return LoRA in fp32, outside tensor cores, beside a module in 16 bits.

    Forward casts the input (6 k) and reads it (4), writes, scales and adds the output (4 + 8 + 10 n), casts the sum
    (6 n); backward casts the output's gradient (6 n), scales it (8) and reads it twice (8), reads the input (4 k),
    writes its gradient (4), casts it (6) and adds it (6).
    """
    moved = product.m * (20 * product.k + 22 * product.n if backward else 10 * product.k + 28 * product.n)
    flops = 2.0 * product.m * part.lora_rank * (product.k + product.n) * (2 if backward else 1)
    count = 4 if backward else 2
    return [
        Operation(name, "pointwise", "fp32", 0, moved, 4 if backward else 5, plain=True),
        Operation(f"{name} products", "matmul", "fp32", flops, 0, count, products=count),
    ]
