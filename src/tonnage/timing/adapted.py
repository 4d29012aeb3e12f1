"""Which linear modules of a layer have adapters, in the names that `operations.products` gives them."""

from collections.abc import Iterable
from typing import Final

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
"""By what transformers calls modules; what means one thing here and another there (`dense`, `c_proj`) is left out."""

_TOGETHER: Final = {"qkv": ("query", "key", "value"), "up": ("gate", "up")}
"""Products that some networks have in place of several."""


def adapted(targets: Iterable[str]) -> frozenset[str] | None:
    """The products that these modules are; None for all, also where a name is not known."""
    found: set[str] = set()
    for target in targets:
        products = _OF_MODULES.get(target.rpartition(".")[2].lower())
        if products is None:
            return None
        found.update(products)
    return frozenset(found)


def has_adapter(product: str, among: frozenset[str] | None) -> bool:
    """Whether a product (also of experts: `expert up`) has adapters; one in place of several if any of these has."""
    if among is None:
        return True
    name = product.removeprefix("expert ").removeprefix("shared ")
    return name in among or not among.isdisjoint(_TOGETHER.get(name, ()))
