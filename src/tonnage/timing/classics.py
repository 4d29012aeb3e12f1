"""Shapes of networks with layer norms, biases and a feed-forward network without a gate: GPT-2 and its relatives."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from tonnage.timing.decoders import SQUARED, STEPWISE, activation_of, rotated_part
from tonnage.timing.shape import Shape

_DROPOUTS: Final = (
    "resid_pdrop",
    "dropout",
    "hidden_dropout_prob",
    "hidden_dropout",
    "residual_dropout",
    "resid_dropout",
)
"""Names that configurations give to the dropout of the residual stream."""


def classic_shape(config: Mapping[str, Any], **stated: Any) -> Shape:
    """Return the Shape of a network with layer norms, biases and a feed-forward network without a gate.

    `stated`: fields of the Shape that are not read from the usual names.
    """
    heads = stated.pop("heads", None) or config["num_attention_heads"]
    h = stated.pop("hidden", None) or config["hidden_size"]
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
        "stepwise_activation": (config.get("activation_function") or config.get("hidden_act")) in STEPWISE
        or (config["model_type"] in ("gpt2", "gptj", "codegen", "gpt_neo") and "activation_function" not in config),
        "biases": "all",
        "parts": 3,
    }
    return Shape(**values | stated)


def _gpt2(config: Mapping[str, Any]) -> Shape:
    """Return the Shape of GPT-2."""
    h, heads = config["n_embd"], config["n_head"]
    return classic_shape(
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
    """Return the Shape of GPT-2 with one key and value for all heads."""
    shape = _gpt2(config)
    return replace(shape, kv_heads=1) if config.get("multi_query", True) else shape


def _gptj(config: Mapping[str, Any]) -> Shape:
    """Return the Shape of GPT-J or CodeGen.

    Attention has no biases, and runs beside the feed-forward network behind one norm.
    """
    h, layers = config["n_embd"], config["n_layer"]
    return classic_shape(
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
    """Return the Shape of GPT-Neo: queries, keys and values have no bias; every second layer sees a window."""
    h, layers, heads = config["hidden_size"], config["num_layers"], config["num_heads"]
    return classic_shape(
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
    """Return the Shape of Falcon: attention and feed-forward network side by side, behind one norm or one each."""
    h, heads = config["hidden_size"], config["num_attention_heads"]
    newer = bool(config.get("new_decoder_architecture"))
    kv_heads = 1 if config.get("multi_query", True) else heads
    if newer:
        kv_heads = config.get("num_kv_heads") or heads
    inner = config.get("ffn_hidden_size") or 4 * h
    beside = bool(config.get("parallel_attn", True))
    return classic_shape(
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
    """Return the Shape of BLOOM."""
    h, heads = config.get("hidden_size") or config["n_embed"], config.get("n_head") or config["num_attention_heads"]
    return classic_shape(
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
    """Return the Shape of OPT."""
    return classic_shape(
        config,
        intermediate=config["ffn_dim"],
        tied=bool(config.get("tie_word_embeddings", True)),
        positions=config["max_position_embeddings"] + 2,  # OPT's positions begin at 2
    )


def _biogpt(config: Mapping[str, Any]) -> Shape:
    """Return the Shape of BioGPT."""
    return classic_shape(
        config,
        tied=bool(config.get("tie_word_embeddings", True)),
        positions=config["max_position_embeddings"] + 2,
    )


def _starcoder2(config: Mapping[str, Any]) -> Shape:
    """Return the Shape of StarCoder2."""
    window = config.get("sliding_window")
    return classic_shape(
        config,
        tied=bool(config.get("tie_word_embeddings", True)),
        rotary=1.0,
        biases="all" if config.get("use_bias", True) else "",
        window=window,
        window_fraction=1.0 if window else 0.0,
    )


def _persimmon(config: Mapping[str, Any]) -> Shape:
    """Return the Shape of Persimmon."""
    heads = config["num_attention_heads"]
    normed = bool(config.get("qk_layernorm", True))
    return classic_shape(
        config,
        rotary=rotated_part(config, 0.5),
        squared_activation=activation_of({"hidden_act": "relu2", **config}) in SQUARED,
        head_norms=normed,
        head_norm_parameters=4 * (config["hidden_size"] // heads) if normed else 0,
        parts=1,
    )


def _neox(config: Mapping[str, Any]) -> Shape:
    """Return the Shape of GPT-NeoX."""
    return classic_shape(config, rotary=config.get("rotary_pct", 0.25), parts=1)


def _phi(config: Mapping[str, Any]) -> Shape:
    """Return the Shape of Phi."""
    return classic_shape(
        config,
        rotary=config.get("partial_rotary_factor", 0.5),
        norms=1,  # attention and feed-forward network share one
        extra_parameters=config["vocab_size"],  # the head has a bias
    )


def _olmo(config: Mapping[str, Any]) -> Shape:
    """Return the Shape of the first OLMo: Llama with layer norms that have no weights."""
    h, layers = config["hidden_size"], config["num_hidden_layers"]
    return classic_shape(
        config,
        gated=True,
        rotary=1.0,
        biases="qkvo" if config.get("attention_bias") else "",
        extra_parameters=-(4 * layers + 2) * h,
    )


CLASSICS: Final[dict[str, Callable[[Mapping[str, Any]], Shape]]] = {
    **{"gpt2": _gpt2, "gpt_bigcode": _bigcode, "gptj": _gptj, "codegen": _gptj, "gpt_neo": _gpt_neo},
    **{"falcon": _falcon, "bloom": _bloom, "opt": _opt, "biogpt": _biogpt, "starcoder2": _starcoder2},
    **{"persimmon": _persimmon, "gpt_neox": _neox, "phi": _phi, "olmo": _olmo},
}
"""Readers of the configurations of these networks, by kind."""
