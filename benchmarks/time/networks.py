"""Networks of published rows that the catalog does not hold, by the names their sources use."""

from __future__ import annotations

from typing import Any, Final

from tonnage.catalog.models import find_model
from tonnage.timing.kinds import read_shape
from tonnage.timing.shape import Shape

_CATALOG: Final = {
    "llama3-8b": "llama-3-8b", "llama-3-8b": "llama-3-8b", "llama 3.1 8b": "llama-3.1-8b",
    "llama-3.1-8b": "llama-3.1-8b", "llama3 8b": "llama-3-8b", "llama3_8b": "llama-3-8b",
    "llama3-70b": "llama-3-70b", "llama3_70b": "llama-3-70b", "llama 3.1 70b": "llama-3.1-70b",
    "llama-3.1-70b": "llama-3.1-70b", "llama3 70b": "llama-3-70b", "llama-3-70b": "llama-3-70b",
    "llama3.1_405b": "llama-3.1-405b", "llama 3.1 405b": "llama-3.1-405b", "llama3.1 405b": "llama-3.1-405b",
    "llama-3.1-405b": "llama-3.1-405b", "llama2-7b": "llama-2-7b", "llama2-13b": "llama-2-13b",
    "llama2-70b": "llama-2-70b", "llama-2-7b": "llama-2-7b", "llama-2-13b": "llama-2-13b",
    "llama-2-70b": "llama-2-70b", "mixtral-8x7b": "mixtral-8x7b",
    "mistral-7b-v0.1": "mistral-7b-v0.1", "qwen3_30b_a3b": "qwen3-30b-a3b",
    "qwen3-30b-a3b": "qwen3-30b-a3b", "qwen3_235b_a22b": "qwen3-235b-a22b", "deepseekv3": "deepseek-v3",
    "gpt oss 120b": "gpt-oss-120b",
}  # fmt: skip

_CLASSIC: Final = {"rms_norm": False, "gated": False, "tied": False, "parts": 1}
_GPT3: Final = {**_CLASSIC, "rotary": 0.0, "biases": "all", "dropout": True}
_NEMOTRON: Final = {**_CLASSIC, "rotary": 0.5, "squared_activation": True}

_GIVEN: Final[dict[str, dict[str, Any]]] = {
    # layers, width, heads, key heads, inner width, words: NeMo's and dgxc-benchmarking's recipes
    "gpt3-5b": {"sizes": (24, 4096, 32, 32, 16384, 51200), **_GPT3},
    "gpt3-20b": {"sizes": (44, 6144, 48, 48, 24576, 51200), **_GPT3},
    "gpt3-175b": {"sizes": (96, 12288, 96, 96, 49152, 51200), **_GPT3},
    "nemotron-8b": {"sizes": (32, 4096, 32, 32, 16384, 256000), **_NEMOTRON},
    "nemotron4 15b": {"sizes": (32, 6144, 48, 8, 24576, 256000), **_NEMOTRON},
    "nemotron-22b": {"sizes": (40, 6144, 48, 48, 24576, 256000), **_NEMOTRON},
    "nemotron4 340b": {"sizes": (96, 18432, 96, 8, 73728, 256000), **_NEMOTRON},
    "nemotron-340b": {"sizes": (96, 18432, 96, 8, 73728, 256000), **_NEMOTRON},
    "nemotron 340b": {"sizes": (96, 18432, 96, 8, 73728, 256000), **_NEMOTRON},
    "grok 1 314b": {
        **{"sizes": (64, 6144, 48, 8, 32768, 131072), "gated": True, "tied": True},
        **{"experts": 8, "experts_per_token": 2, "expert_intermediate": 32768},
    },
    "powerlm-3b": {"sizes": (40, 2304, 36, 36, 9216, 49152), "gated": True, "tied": True, "parts": 3},
    "internlm-7b": {"sizes": (32, 4096, 32, 32, 11008, 103168), "gated": True, "tied": False},
    "internlm-20b": {"sizes": (60, 5120, 40, 40, 13824, 103168), "gated": True, "tied": False},
}


def shape_of(name: str, layers: int | None = None) -> Shape | None:
    """The network of this name, with another number of layers where a proxy was measured; None: not known."""
    key = name.lower().replace(" dev", "").replace(" finetuning sft", "").replace(" finetuning lora", "").strip()
    known = find_model(_CATALOG[key]) if key in _CATALOG else None
    if known is not None:
        return read_shape({**known.config(), **({"num_hidden_layers": layers} if layers else {})})
    given = _GIVEN.get(key)
    if given is None:
        return None
    values = dict(given)
    count, hidden, heads, kv_heads, inner, vocab = values.pop("sizes")
    head_dim = hidden // heads
    return Shape(
        layers=layers or count, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=head_dim,
        intermediate=inner, vocab=vocab, **values,
    )  # fmt: skip
