"""The networks of the matrix: public configurations, and smaller ones that keep an architecture's ways."""

from __future__ import annotations

import re
from typing import Any, Final

from tonnage.catalog.models import find_model
from tonnage.model import ModelRef


def _llama(width: int, inner: int, layers: int, heads: int, groups: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        **more,
    }


def _qwen(version: str, *sizes: int, **more: Any) -> dict[str, Any]:
    return {**_llama(*sizes), "model_type": version, "max_position_embeddings": 32768, **more}


CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, 128256, tie_word_embeddings=True, head_dim=64),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, 8, 128256, tie_word_embeddings=True, head_dim=128),
    "llama-3.1-8b": _llama(4096, 14336, 32, 32, 8, 128256),
    "llama-2-7b": _llama(4096, 11008, 32, 32, 32, 32000, max_position_embeddings=4096),
    "tinyllama-1.1b": _llama(2048, 5632, 22, 32, 4, 32000, max_position_embeddings=2048),
    "smollm2-135m": _llama(576, 1536, 30, 9, 3, 49152, tie_word_embeddings=True),
    "smollm2-360m": _llama(960, 2560, 32, 15, 5, 49152, tie_word_embeddings=True),
    "qwen2.5-1.5b": _qwen("qwen2", 1536, 8960, 28, 12, 2, 151936, tie_word_embeddings=True),
    "qwen2.5-7b": _qwen("qwen2", 3584, 18944, 28, 28, 4, 152064),
    "qwen3-1.7b": _qwen("qwen3", 2048, 6144, 28, 16, 8, 151936, tie_word_embeddings=True, head_dim=128),
    "gemma-2-2b": {
        **_llama(2304, 9216, 26, 8, 4, 256000),
        "model_type": "gemma2",
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    "mixtral-4-layers": {
        **_llama(4096, 14336, 4, 32, 8, 32000),
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3-moe-8-layers": {
        **_qwen("qwen3_moe", 2048, 6144, 8, 32, 4, 151936),
        "head_dim": 128,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    "qwen3.5-8-layers": {
        "model_type": "qwen3_5_text",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "vocab_size": 248320,
        "tie_word_embeddings": True,
    },
    "gpt2-medium": {"model_type": "gpt2", "n_embd": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 50257},
    "bert-large": {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "vocab_size": 30522,
    },
    "modernbert-base": {"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"]},
    "t5-base": {
        "model_type": "t5",
        "d_model": 768,
        "d_ff": 3072,
        "d_kv": 64,
        "num_layers": 12,
        "num_heads": 12,
        "vocab_size": 32128,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    },
    "vit-large": {
        "model_type": "vit",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 16,
        "num_labels": 1000,
    },
}
"""By name, as transformers reads them.  A name with `-layers` is an architecture cut to that many layers."""


_CUT: Final = re.compile(r"(?P<whole>.+)-(?P<layers>[0-9]+)-layers")


def model(name: str) -> ModelRef:
    """The named network: one of `CONFIGS`, else of the catalog, of which `NAME-4-layers` has the first four.

    Raises KeyError with the names there are.
    """
    config = CONFIGS.get(name) or _of_catalog(name)
    if config is None:
        raise KeyError(f"{name!r}; there are {', '.join(CONFIGS)}, and what the catalog has")
    return ModelRef(name=name, kind="config", config=config, source="benchmarks/gpu/models.py")


def _of_catalog(name: str) -> dict[str, Any] | None:
    cut = _CUT.fullmatch(name)
    found = find_model(cut["whole"] if cut else name)
    if found is None:
        return None
    config = found.config()
    if cut is not None:
        layers = config["num_hidden_layers"] = int(cut["layers"])
        config.update({"layer_types": config["layer_types"][:layers]} if "layer_types" in config else {})
    return config
