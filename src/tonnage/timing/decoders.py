"""Shapes of decoders whose configurations have Llama's fields: a row of a table for each kind of network.

What a configuration does not state has the default of the kind's code in transformers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tonnage.timing.shape import Shape

STEPWISE: Final = ("gelu_new", "gelu_fast", "gelu_python", "xielu")
"""Activations that libraries compute in several kernels."""

SQUARED: Final = ("relu2", "relu_squared")
"""Activations that are a squared ReLU."""


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """Differences of a kind of decoder from Llama, whose fields it has."""

    tied: bool = False
    """The head is the embedding, unless the configuration states otherwise."""
    norms: int = 2
    """Norms of a layer."""
    last: bool = False
    """A layer's last product is followed by a norm."""
    plain_norms: bool = False
    """Norms are torch's layer norms, with a weight and a bias."""
    heads: str = ""
    """Weights of the norms of queries and keys: those of one `head`, of `all` heads, or `none`; empty: there are no
    such norms."""
    biases: str = ""
    """Products that have a bias, in Shape's words."""
    attention_bias: str = "qkvo"
    """Products that have a bias where the configuration's `attention_bias` is true."""
    gated: bool = True
    """A gate multiplies the inner values."""
    rotary: float = 1.0
    """Part of each head that is rotated, unless the configuration states otherwise."""
    parts: int = 3
    """Matrices of query, key and value; 1: they are one matrix."""
    keeps_scores: bool = False
    """Only the network's own attention and flex attention can compute it."""
    clamped: bool = False
    """Both halves of a gated activation are clamped first."""
    dense: int = 0
    """Layers without experts at the beginning, unless the configuration states otherwise."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The kind's own name of a field, by Llama's name."""


DECODERS: Final[dict[str, _Kind]] = {
    **dict.fromkeys(
        ("llama", "mistral", "mixtral", "granite", "granitemoe", "granitemoeshared", "deepseek_v2"), _Kind()
    ),
    **dict.fromkeys(("cwm", "helium", "internlm3", "iquestcoder", "ministral", "ministral3", "deepseek_v3"), _Kind()),
    "hyperclovax": _Kind(),
    **dict.fromkeys(("gemma", "smollm3", "minicpm3", "youtu"), _Kind(tied=True)),
    **dict.fromkeys(("qwen2", "qwen2_moe"), _Kind(biases="qkv")),
    **dict.fromkeys(("qwen3", "qwen3_moe", "hunyuan_v1_dense", "dots1", "mellum"), _Kind(heads="head")),
    "gemma2": _Kind(tied=True, norms=4, last=True),
    "gemma3_text": _Kind(tied=True, norms=4, last=True, heads="head"),
    "vaultgemma": _Kind(tied=True, keeps_scores=True),
    "phi3": _Kind(parts=1),
    "phimoe": _Kind(plain_norms=True),
    **dict.fromkeys(("olmo2", "olmo3", "flex_olmo"), _Kind(last=True, heads="all")),
    **dict.fromkeys(("olmoe", "minimax_m2"), _Kind(heads="all")),
    "gpt_oss": _Kind(biases="qkvo", keeps_scores=True, clamped=True),
    **dict.fromkeys(("cohere", "cohere2"), _Kind(tied=True, norms=1)),
    **dict.fromkeys(("exaone4", "exaone_moe"), _Kind(heads="head", last=True)),
    "ernie4_5": _Kind(tied=True),
    "ernie4_5_moe": _Kind(
        tied=True,
        dense=1,
        names={
            "num_experts": "moe_num_experts",
            "num_experts_per_tok": "moe_k",
            "n_shared_experts": "moe_num_shared_experts",
            "first_k_dense_replace": "moe_layer_start_index",
        },
    ),
    "glm": _Kind(rotary=0.5, biases="qkv", attention_bias="qkv"),
    "glm4": _Kind(rotary=0.5, biases="qkv", attention_bias="qkv", norms=4, last=True),
    "glm4_moe": _Kind(rotary=0.5, attention_bias="qkv", dense=1),
    **dict.fromkeys(("glm4_moe_lite",), _Kind(dense=1)),
    "solar_open": _Kind(attention_bias="qkv"),
    "seed_oss": _Kind(biases="qkv", attention_bias="qkv"),
    "stablelm": _Kind(plain_norms=True, rotary=0.25),
    "apertus": _Kind(gated=False, heads="head"),
    "arcee": _Kind(gated=False),
    "nemotron": _Kind(gated=False, plain_norms=True, rotary=0.5),
    "jais2": _Kind(gated=False, plain_norms=True, biases="all", attention_bias="all"),
    "llama4_text": _Kind(heads="none"),
}
"""Decoders whose configurations have Llama's fields."""


def read_decoder(config: Mapping[str, Any]) -> Shape:
    """Return the Shape of one of DECODERS.  Raise KeyError for a field that the configuration lacks."""
    kind = DECODERS[config["model_type"]]
    config = {**{ours: config[theirs] for ours, theirs in kind.names.items() if theirs in config}, **config}
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    latent = config.get("kv_lora_rank") or 0
    head_dim = _head_dim(config, heads)
    if latent:
        head_dim = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    window, fraction = _window(config)
    normed = kind.heads or ("head" if config.get("use_qk_norm") or config.get("qk_layernorm") else "")
    if config["model_type"] == "llama4_text" and not config.get("use_qk_norm", True):
        normed = ""
    head_norm_weights = {"head": 2 * head_dim, "all": (heads + kv_heads) * head_dim}.get(normed, 0)
    if config["model_type"] == "cohere" and normed:
        head_norm_weights = (heads + kv_heads) * head_dim
    experts = _experts(config, kind)
    return Shape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=config["v_head_dim"] if latent else head_dim,
        intermediate=_dense_width(config, experts),
        gated=kind.gated,
        vocab=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", kind.tied)),
        rms_norm=not kind.plain_norms,
        ends_in_norm=kind.last or bool(config.get("use_post_norm")),
        norms=_count_norms(config, kind),
        head_norms=bool(normed),
        head_norm_parameters=head_norm_weights,
        rotary=rotated_part(config, kind.rotary),
        biases=_biases(config, kind),
        squared_activation=activation_of(config) in SQUARED,
        stepwise_activation=not kind.gated and activation_of(config) in STEPWISE,
        parts=kind.parts,
        query_rank=config.get("q_lora_rank") or 0,
        latent_rank=latent,
        rotary_dim=config["qk_rope_head_dim"] if latent else 0,
        keeps_scores=kind.keeps_scores or bool(config.get("attn_logit_softcapping")),
        flexible=True,
        window=window,
        window_fraction=fraction,
        extra_parameters=_count_other_weights(config, experts),
        clamped_activation=kind.clamped,
        **experts,
    )


def _head_dim(config: Mapping[str, Any], heads: int) -> int:
    """Return the width of a head of plain attention."""
    return int(config.get("head_dim") or config["hidden_size"] // heads)


def activation_of(config: Mapping[str, Any]) -> str:
    """Return the name of the activation; empty where the configuration names none."""
    named = (config.get(name) for name in ("hidden_act", "hidden_activation", "activation_function", "activation"))
    return str(next((one for one in named if one), ""))


def _count_norms(config: Mapping[str, Any], kind: _Kind) -> int:
    """Return the norms of a layer; one where attention and feed-forward network run side by side."""
    if config.get("use_parallel_residual") and config["model_type"] == "stablelm":
        return 1
    return 4 if config.get("use_post_norm") else kind.norms


def rotated_part(config: Mapping[str, Any], usual: float) -> float:
    """Return the part of queries and keys that is rotated, over all layers."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config.get("rotary_dim") and config.get("head_dim"):  # MiniMax
        usual = config["rotary_dim"] / config["head_dim"]
    part = config.get("partial_rotary_factor", rope.get("partial_rotary_factor", usual))
    rotates = config.get("no_rope_layers")  # 1 for each layer that rotates
    if isinstance(rotates, Sequence) and rotates:
        return float(part) * sum(bool(layer) for layer in rotates) / len(rotates)
    return float(part)


def _biases(config: Mapping[str, Any], kind: _Kind) -> str:
    """Return the products that have a bias, in Shape's words."""
    if config.get("use_qkv_bias"):
        return "qkv"
    stated = config.get("attention_bias")
    if stated is None:
        return kind.biases
    if stated:
        return "all" if config.get("mlp_bias") else kind.attention_bias
    return kind.biases if kind.biases == "qkvo" or config["model_type"] in ("qwen2", "qwen2_moe") else ""


def _count_other_weights(config: Mapping[str, Any], experts: Mapping[str, Any]) -> int:
    """Return the weights of all layers that no other field of Shape counts."""
    layers: int = config["num_hidden_layers"]
    routed: int = layers - experts.get("dense_layers", 0)
    others: dict[str, int] = {
        "gpt_oss": layers * config["num_attention_heads"],  # sinks
        "qwen2_moe": routed * config["hidden_size"],  # the shared expert's gate
        "ernie4_5_moe": routed * experts.get("experts", 0),  # the correction of the router
        "apertus": 2 * layers,  # the activation's
    }
    return others.get(config["model_type"], 0)


_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")


def _experts(config: Mapping[str, Any], kind: _Kind) -> dict[str, Any]:
    """Return the fields of Shape that are about experts; empty where there are none."""
    experts = next((config[name] for name in _EXPERTS if config.get(name)), 0)
    if not experts:
        return {}
    dense = _count_dense_layers(config, kind)
    if config["model_type"] == "llama4_text":
        inner = shared = config["intermediate_size"]
    else:
        inner = config.get("moe_intermediate_size") or config["intermediate_size"]
        shared = inner * (config.get("n_shared_experts") or config.get("num_shared_experts") or 0)
        shared = config.get("shared_expert_intermediate_size") or config.get("shared_intermediate_size") or shared
    return {
        "experts": experts,
        "experts_per_token": config["num_experts_per_tok"],
        "expert_intermediate": inner,
        "shared_intermediate": shared,
        "dense_layers": dense,
    }


def _count_dense_layers(config: Mapping[str, Any], kind: _Kind) -> int:
    """Return the layers without experts, in a network with experts."""
    layers = range(config["num_hidden_layers"])
    listed = config.get("mlp_layer_types")
    if isinstance(listed, Sequence) and listed:
        return sum(kind_of_layer == "dense" for kind_of_layer in listed)
    if config["model_type"] == "llama4_text":
        with_experts = config.get("moe_layers")
        step = config.get("interleave_moe_layer_step") or 1
        return len(layers) - (len(with_experts) if with_experts else len(layers) // step)
    first = config.get("first_k_dense_replace", kind.dense)
    each, every = config.get("decoder_sparse_step") or 1, config.get("moe_layer_freq") or 1
    alone = config.get("mlp_only_layers") or ()
    return sum(i < first or i in alone or (i + 1) % each != 0 or i % every != 0 for i in layers)


def _dense_width(config: Mapping[str, Any], experts: Mapping[str, Any]) -> int:
    """Return the inner width of layers without experts."""
    if experts and config["model_type"] == "llama4_text":
        return int(config["intermediate_size_mlp"])
    if "intermediate_size" not in config and experts and not experts["dense_layers"]:
        return 0
    return config["intermediate_size"]  # type: ignore[no-any-return]  # `kinds._check_numbers` looks at it


_CHUNKED: Final = ("sliding_attention", "chunked_attention")


def _window(config: Mapping[str, Any]) -> tuple[int | None, float]:
    """Return the tokens of the sliding window, and the part of the layers that have it."""
    window = config.get("sliding_window") or config.get("attention_chunk_size")
    if not window or config.get("use_sliding_window") is False:
        return None, 0.0
    kinds = config.get("layer_types")
    if kinds:
        return window, sum(kind in _CHUNKED for kind in kinds) / len(kinds)
    if config["model_type"] in ("gemma2", "vaultgemma"):
        return window, 0.5
    if config["model_type"] == "llama4_text":
        return window, 0.75
    every = config.get("sliding_window_pattern")
    return window, (every - 1) / every if every else 1.0
