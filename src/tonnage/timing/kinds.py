"""The Shape of a network, read from its Hugging Face configuration: one row of a table for each kind of network.

What a configuration does not say is what the kind's code in transformers takes then.  Tests build each kind and
compare its count of weights, its norms and its biases.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from tonnage.errors import UnknownNetwork
from tonnage.timing.shape import Shape


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """How a kind of decoder differs from Llama, whose fields it has."""

    tied: bool = False
    """Whether the head is the embedding, unless said otherwise."""
    norms: int = 2
    """Norms of a layer."""
    last: bool = False
    """Whether a layer's last product is followed by a norm."""
    plain_norms: bool = False
    """Whether norms are torch's layer norms, with a weight and a bias."""
    heads: str = ""
    """Which weights the norms of queries and keys have: those of one `head`, those of `all`, those of `none`; empty:
    there are no such norms."""
    biases: str = ""
    """Which products have one, in Shape's words."""
    attention_bias: str = "qkvo"
    """Which have one where the configuration's `attention_bias` is true."""
    gated: bool = True
    """Whether a gate multiplies the inner values."""
    rotary: float = 1.0
    """Part of each head that is rotated, unless said otherwise."""
    parts: int = 3
    """1: query, key and value are one matrix."""
    keeps_scores: bool = False
    """Whether there is no attention for it but the network's own and flex."""
    clamped: bool = False
    """Whether both halves of a gated activation are clamped first."""
    dense: int = 0
    """Layers without experts at the beginning, unless said otherwise."""
    names: Mapping[str, str] = field(default_factory=dict)
    """What it calls a field, by Llama's name."""


_DECODERS: Final[dict[str, _Kind]] = {
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

TIMED: Final = frozenset(
    {
        *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "olmo2", "granite"),
        *("phi", "phi3", "deepseek_v2", "deepseek_v3", "gpt_oss", "gpt2", "gpt_neox", "opt", "bert", "modernbert"),
    }
)
"""Kinds of which steps were measured."""

_STEPWISE: Final = ("gelu_new", "gelu_fast", "gelu_python", "xielu")
_SQUARED: Final = ("relu2", "relu_squared")
_DROPOUTS: Final = (
    "resid_pdrop",
    "dropout",
    "hidden_dropout_prob",
    "hidden_dropout",
    "residual_dropout",
    "resid_dropout",
)


_MOST_KNOWN: Final = 64
_KNOWN: Final[dict[int, tuple[dict[str, Any], Shape]]] = {}
"""Shapes by the identity of their configuration, with what that said: a search asks for one ten thousand times."""


def read_shape(config: Mapping[str, Any]) -> Shape:
    """The Shape of a config.json.  Raises UnknownNetwork with one line for a kind it does not know."""
    known = _KNOWN.get(id(config))
    if known is None or known[0] != config:
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        known = _KNOWN[id(config)] = dict(config), _read(config)
    return known[1]


def _read(config: Mapping[str, Any]) -> Shape:
    kind = str(config.get("model_type"))
    reader = _llama if kind in _DECODERS else _OTHERS.get(kind)
    if reader is None:
        known = f"Known: {len(KINDS)} kinds of decoders and encoders of text."
        raise UnknownNetwork(f"The time of a {kind!r} network is not known; its memory is. {known}")
    try:
        return _usable(replace(reader(config), unmeasured="" if kind in TIMED else kind))
    except KeyError as missing:
        raise UnknownNetwork(f"The configuration of this {kind} network does not say {missing}.") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UnknownNetwork(f"The dimensions of this {kind} network cannot be read ({error}).") from None


_NUMBERS: Final = {"int": (int,), "int | None": (int, type(None)), "float": (int, float)}
"""By a field's annotation the types of its value; truth values and texts are made here, not read."""


def _usable(shape: Shape) -> Shape:
    """The same Shape; ValueError where a field is no number, as one that transformers has a default for."""
    for item in fields(shape):
        value = getattr(shape, item.name)
        allowed = _NUMBERS.get(str(getattr(item.type, "__name__", item.type)))
        if allowed is not None and (isinstance(value, bool) or not isinstance(value, allowed)):
            raise ValueError(f"{item.name} is {'not stated' if value is None else repr(value)[:40]}")
    return shape


# -- decoders as Llama's


def _llama(config: Mapping[str, Any]) -> Shape:
    kind = _DECODERS[config["model_type"]]
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
    of_heads = {"head": 2 * head_dim, "all": (heads + kv_heads) * head_dim}.get(normed, 0)
    if config["model_type"] == "cohere" and normed:
        of_heads = (heads + kv_heads) * head_dim
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
        norms=_norms(config, kind),
        head_norms=bool(normed),
        head_norm_parameters=of_heads,
        rotary=_rotated(config, kind.rotary),
        biases=_biases(config, kind),
        squared_activation=_activation(config) in _SQUARED,
        stepwise_activation=not kind.gated and _activation(config) in _STEPWISE,
        parts=kind.parts,
        query_rank=config.get("q_lora_rank") or 0,
        latent_rank=latent,
        rotary_dim=config["qk_rope_head_dim"] if latent else 0,
        keeps_scores=kind.keeps_scores or bool(config.get("attn_logit_softcapping")),
        flexible=True,
        window=window,
        window_fraction=fraction,
        extra_parameters=_besides(config, experts),
        clamped_activation=kind.clamped,
        **experts,
    )


def _head_dim(config: Mapping[str, Any], heads: int) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // heads)


def _activation(config: Mapping[str, Any]) -> str:
    named = (config.get(name) for name in ("hidden_act", "hidden_activation", "activation_function", "activation"))
    return str(next((one for one in named if one), ""))


def _norms(config: Mapping[str, Any], kind: _Kind) -> int:
    """Norms of a layer; one where attention and feed-forward network run side by side."""
    if config.get("use_parallel_residual") and config["model_type"] == "stablelm":
        return 1
    return 4 if config.get("use_post_norm") else kind.norms


def _rotated(config: Mapping[str, Any], usual: float) -> float:
    """The part of queries and keys that is rotated, over all layers."""
    said = config.get("rope_parameters") or config.get("rope_scaling") or {}
    part = config.get("partial_rotary_factor", said.get("partial_rotary_factor", usual))
    rotated = config.get("no_rope_layers")  # of each layer 1: it rotates
    if isinstance(rotated, Sequence) and rotated:
        return float(part) * sum(bool(one) for one in rotated) / len(rotated)
    return float(part)


def _biases(config: Mapping[str, Any], kind: _Kind) -> str:
    if config.get("use_qkv_bias"):
        return "qkv"
    said = config.get("attention_bias")
    if said is None:
        return kind.biases
    if said:
        return "all" if config.get("mlp_bias") else kind.attention_bias
    return kind.biases if kind.biases == "qkvo" or config["model_type"] in ("qwen2", "qwen2_moe") else ""


def _besides(config: Mapping[str, Any], experts: Mapping[str, Any]) -> int:
    """Weights of all layers that no other field counts."""
    layers: int = config["num_hidden_layers"]
    routed: int = layers - experts.get("dense_layers", 0)
    counted: dict[str, int] = {
        "gpt_oss": layers * config["num_attention_heads"],  # sinks
        "qwen2_moe": routed * config["hidden_size"],  # the shared expert's gate
        "ernie4_5_moe": routed * experts.get("experts", 0),  # what corrects the router
        "apertus": 2 * layers,  # of the activation
    }
    return counted.get(config["model_type"], 0)


_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")


def _experts(config: Mapping[str, Any], kind: _Kind) -> dict[str, Any]:
    """The fields of Shape that are about experts."""
    experts = next((config[name] for name in _EXPERTS if config.get(name)), 0)
    if not experts:
        return {}
    dense = _dense_layers(config, kind)
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


def _dense_layers(config: Mapping[str, Any], kind: _Kind) -> int:
    """Layers without experts, where there are experts."""
    layers = range(config["num_hidden_layers"])
    listed = config.get("mlp_layer_types")
    if isinstance(listed, Sequence) and listed:
        return sum(one == "dense" for one in listed)
    if config["model_type"] == "llama4_text":
        with_experts = config.get("moe_layers")
        step = config.get("interleave_moe_layer_step") or 1
        return len(layers) - (len(with_experts) if with_experts else len(layers) // step)
    first = config.get("first_k_dense_replace", kind.dense)
    each, every = config.get("decoder_sparse_step") or 1, config.get("moe_layer_freq") or 1
    alone = config.get("mlp_only_layers") or ()
    return sum(one < first or one in alone or (one + 1) % each != 0 or one % every != 0 for one in layers)


def _dense_width(config: Mapping[str, Any], experts: Mapping[str, Any]) -> int:
    """Inner width of layers without experts."""
    if experts and config["model_type"] == "llama4_text":
        return int(config["intermediate_size_mlp"])
    if "intermediate_size" not in config and experts and not experts["dense_layers"]:
        return 0
    return config["intermediate_size"]  # type: ignore[no-any-return]  # `_usable` looks at it


_CHUNKED: Final = ("sliding_attention", "chunked_attention")


def _window(config: Mapping[str, Any]) -> tuple[int | None, float]:
    """Tokens of the sliding window, and the part of the layers that have it."""
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


# -- networks with layer norms and biases


def _gpt2(config: Mapping[str, Any]) -> Shape:
    h, heads = config["n_embd"], config["n_head"]
    return _classic(
        config,
        layers=config["n_layer"],
        hidden=h,
        heads=heads,
        intermediate=config.get("n_inner") or 4 * h,
        tied=bool(config.get("tie_word_embeddings", True)),
        positions=config.get("n_positions", 1024),
        parts=1,
    )


def _bigcode(config: Mapping[str, Any]) -> Shape:
    """GPT-2 with one key and value for all heads."""
    known = _gpt2(config)
    return replace(known, kv_heads=1) if config.get("multi_query", True) else known


def _gptj(config: Mapping[str, Any]) -> Shape:
    """GPT-J and CodeGen: attention without biases beside the feed-forward network, behind one norm."""
    h, layers = config["n_embd"], config["n_layer"]
    return _classic(
        config,
        layers=layers,
        hidden=h,
        heads=config["n_head"],
        intermediate=config.get("n_inner") or 4 * h,
        rotary=(config.get("rotary_dim") or 64) * config["n_head"] / h,
        norms=1,
        parts=1 if config["model_type"] == "codegen" else 3,
        extra_parameters=config["vocab_size"] - 4 * h * layers,  # the head has a bias, attention has none
    )


def _gpt_neo(config: Mapping[str, Any]) -> Shape:
    """GPT-Neo, whose queries, keys and values have no bias; every second layer sees a window."""
    h, layers, heads = config["hidden_size"], config["num_layers"], config["num_heads"]
    return _classic(
        config,
        layers=layers,
        heads=heads,
        intermediate=config.get("intermediate_size") or 4 * h,
        tied=bool(config.get("tie_word_embeddings", True)),
        positions=config.get("max_position_embeddings", 2048),
        keeps_scores=True,
        window=config.get("window_size", 256),
        window_fraction=0.5,
        extra_parameters=-3 * h * layers,
    )


def _falcon(config: Mapping[str, Any]) -> Shape:
    """Falcon; attention and feed-forward network side by side, behind one norm or one each."""
    h, heads = config["hidden_size"], config["num_attention_heads"]
    newer = bool(config.get("new_decoder_architecture"))
    kv_heads = 1 if config.get("multi_query", True) else heads
    if newer:
        kv_heads = config.get("num_kv_heads") or heads
    inner = config.get("ffn_hidden_size") or 4 * h
    beside = bool(config.get("parallel_attn", True))
    return _classic(
        config,
        kv_heads=kv_heads,
        intermediate=inner,
        tied=bool(config.get("tie_word_embeddings", True)),
        rotary=0.0 if config.get("alibi") else 1.0,
        norms=2 if (newer and config.get("num_ln_in_parallel_attn", 2) == 2) or not beside else 1,
        biases="all" if config.get("bias") else "",
        parts=1,
    )


def _bloom(config: Mapping[str, Any]) -> Shape:
    h, heads = config.get("hidden_size") or config["n_embed"], config.get("n_head") or config["num_attention_heads"]
    return _classic(
        config,
        layers=config.get("n_layer") or config["num_hidden_layers"],
        hidden=h,
        heads=heads,
        intermediate=4 * h,
        tied=bool(config.get("tie_word_embeddings", True)),
        stepwise_activation=True,
        keeps_scores=True,  # positions are a bias of scores
        parts=1,
        extra_parameters=2 * h,  # the norm after the embedding
    )


def _opt(config: Mapping[str, Any]) -> Shape:
    return _classic(
        config,
        intermediate=config["ffn_dim"],
        tied=bool(config.get("tie_word_embeddings", True)),
        positions=config["max_position_embeddings"] + 2,  # OPT's positions begin at 2
    )


def _biogpt(config: Mapping[str, Any]) -> Shape:
    return _classic(
        config,
        tied=bool(config.get("tie_word_embeddings", True)),
        positions=config["max_position_embeddings"] + 2,
    )


def _starcoder2(config: Mapping[str, Any]) -> Shape:
    window = config.get("sliding_window")
    return _classic(
        config,
        tied=bool(config.get("tie_word_embeddings", True)),
        rotary=1.0,
        biases="all" if config.get("use_bias", True) else "",
        window=window,
        window_fraction=1.0 if window else 0.0,
    )


def _persimmon(config: Mapping[str, Any]) -> Shape:
    heads = config["num_attention_heads"]
    normed = bool(config.get("qk_layernorm", True))
    return _classic(
        config,
        rotary=_rotated(config, 0.5),
        squared_activation=_activation({"hidden_act": "relu2", **config}) in _SQUARED,
        head_norms=normed,
        head_norm_parameters=4 * (config["hidden_size"] // heads) if normed else 0,
        parts=1,
    )


def _neox(config: Mapping[str, Any]) -> Shape:
    return _classic(config, rotary=config.get("rotary_pct", 0.25), parts=1)


def _phi(config: Mapping[str, Any]) -> Shape:
    return _classic(
        config,
        rotary=config.get("partial_rotary_factor", 0.5),
        norms=1,  # attention and feed-forward network share one
        extra_parameters=config["vocab_size"],  # the head has a bias
    )


def _olmo(config: Mapping[str, Any]) -> Shape:
    """The first OLMo: Llama with layer norms that have no weights."""
    h, layers = config["hidden_size"], config["num_hidden_layers"]
    return _classic(
        config,
        gated=True,
        rotary=1.0,
        biases="qkvo" if config.get("attention_bias") else "",
        extra_parameters=-(4 * layers + 2) * h,
    )


# -- encoders


def _bert(config: Mapping[str, Any]) -> Shape:
    """BERT and its family, whose code differs in names alone."""
    h = config["hidden_size"]
    head = h * h + h + 2 * h + config["vocab_size"]  # transform, its norm, bias of the words
    positions = config.get("max_position_embeddings", 512) + config.get("type_vocab_size", 2)
    if config["model_type"] == "ernie" and config.get("use_task_id"):
        positions += config.get("task_type_vocab_size", 3)
    return _classic(
        config,
        ends_in_norm=True,
        causal=False,
        tied=bool(config.get("tie_word_embeddings", True)),
        positions=positions,
        biases="all",
        extra_parameters=head,  # the norm after the embedding stands for the final one that BERT has not
    )


def _electra(config: Mapping[str, Any]) -> Shape:
    """ELECTRA, whose words may be narrower than its layers."""
    known, h, narrow = _bert(config), config["hidden_size"], config.get("embedding_size") or config["hidden_size"]
    words = config["vocab_size"] + config.get("max_position_embeddings", 512) + config.get("type_vocab_size", 2)
    between = h * narrow + narrow + config["vocab_size"] + 2 * narrow - 2 * h + 2 * narrow
    between += (narrow * h + h) if narrow != h else 0
    return replace(known, extra_parameters=words * (narrow - h) + between)


def _distilbert(config: Mapping[str, Any]) -> Shape:
    h = config["dim"]
    return _classic(
        config,
        layers=config["n_layers"],
        hidden=h,
        heads=config["n_heads"],
        intermediate=config["hidden_dim"],
        ends_in_norm=True,
        causal=False,
        tied=bool(config.get("tie_word_embeddings", True)),
        positions=config.get("max_position_embeddings", 512),
        extra_parameters=h * h + h + 2 * h + config["vocab_size"],
    )


def _modernbert(config: Mapping[str, Any]) -> Shape:
    """ModernBERT, whose configurations may leave out what is usual; two of three layers see a window."""
    h, heads = config.get("hidden_size", 768), config.get("num_attention_heads", 12)
    vocab, every = config.get("vocab_size", 50368), config.get("global_attn_every_n_layers", 3)
    layers = config.get("num_hidden_layers", 22)
    return Shape(
        layers=layers,
        hidden=h,
        heads=heads,
        kv_heads=heads,
        head_dim=h // heads,
        value_dim=h // heads,
        intermediate=config.get("intermediate_size", 1152),
        gated=True,
        vocab=vocab,
        tied=bool(config.get("tie_word_embeddings", True)),
        causal=False,
        rms_norm=False,
        biased_scores=True,  # the window is a mask
        window=config.get("local_attention", 128),
        window_fraction=1 - 1 / every,
        extra_parameters=h * h + vocab - 2 * layers * h,  # the head's layer and the bias of words; norms have none
    )


def _classic(config: Mapping[str, Any], **known: Any) -> Shape:
    """A network with layer norms, biases and a feed-forward network without a gate."""
    heads = known.pop("heads", None) or config["num_attention_heads"]
    h = known.pop("hidden", None) or config["hidden_size"]
    head_dim = h // heads
    values: dict[str, Any] = {
        "layers": config.get("num_hidden_layers"),
        "hidden": h,
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "value_dim": head_dim,
        "intermediate": config.get("intermediate_size"),
        "gated": False,
        "vocab": config["vocab_size"],
        "tied": bool(config.get("tie_word_embeddings", False)),
        "rms_norm": False,
        "rotary": 0.0,
        "dropout": any(config.get(name) for name in _DROPOUTS),
        "stepwise_activation": (config.get("activation_function") or config.get("hidden_act")) in _STEPWISE
        or (config["model_type"] in ("gpt2", "gptj", "codegen", "gpt_neo") and "activation_function" not in config),
        "biases": "all",
        "parts": 3,
    }
    return Shape(**values | known)


_BERTS: Final = ("bert", "roberta", "xlm-roberta", "camembert", "data2vec-text", "ernie")

_OTHERS: Final[dict[str, Callable[[Mapping[str, Any]], Shape]]] = {
    **{"gpt2": _gpt2, "gpt_bigcode": _bigcode, "gptj": _gptj, "codegen": _gptj, "gpt_neo": _gpt_neo},
    **{"falcon": _falcon, "bloom": _bloom, "opt": _opt, "biogpt": _biogpt, "starcoder2": _starcoder2},
    **{"persimmon": _persimmon, "gpt_neox": _neox, "phi": _phi, "olmo": _olmo},
    **{**dict.fromkeys(_BERTS, _bert), "electra": _electra, "distilbert": _distilbert, "modernbert": _modernbert},
}
"""Networks whose configurations have fields of their own, or that have another kind of layer."""

KINDS: Final = (*_DECODERS, *_OTHERS)
"""All that are known."""
