"""A network in Megatron-Core's settings, from its Hugging Face configuration; imports no torch and no Megatron-Core.

Names are those of megatron-core 0.16.  Besides the shapes, a family has the settings that Megatron-Bridge gives its
own networks of that family (src/megatron/bridge/models), as far as layers without Transformer Engine know them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

WORDS_A_RANK: Final = 128
"""The vocabulary is padded to a multiple of so many rows a tensor-parallel rank (--make-vocab-size-divisible-by)."""

AUXILIARY_LOSS: Final = 1e-3
"""The weight of the router's loss where the configuration names none: the default of transformers' configurations,
and Megatron-Bridge's value for Qwen's experts."""

ROTARY: Final = ("default", "llama3", "linear")
"""Kinds of rotary positions that GPTModel has settings for."""

LATENT: Final = "kv_lora_rank"
"""A field of every configuration with multi-latent attention.  That attention gives the one inside of it the widths
of keys and of values (`k_channels`, `v_channels`), which megatron-core 0.16's `DotProductAttention` does not take."""

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network in Megatron-Core's settings."""

    transformer: Mapping[str, Any]
    """Fields of `TransformerConfig`; `activation_func` is a name of torch.nn.functional."""
    gpt: Mapping[str, Any]
    """Arguments of `GPTModel`."""
    words: int
    """Rows of the vocabulary, without padding."""
    positions: int | None = None
    """Rows of the table of learned positions; None: it has none."""

    @property
    def experts(self) -> int | None:
        """The experts of a layer; None for a network without experts."""
        experts: int | None = self.transformer.get("num_moe_experts")
        return experts

    def rows(self, tp: int) -> int:
        """Return the padded rows of the vocabulary on `tp` ranks together."""
        multiple = WORDS_A_RANK * tp
        return -(-self.words // multiple) * multiple

    def divided(self, tp: int, pp: int, ep: int) -> Mapping[str, tuple[int, int]]:
        """Return for each thing that ranks divide how many there are, and among how many ranks."""
        transformer = self.transformer
        return {
            "attention heads": (transformer["num_attention_heads"], tp),
            "key and value heads": (transformer["num_query_groups"], tp),
            "columns inside an MLP": (transformer["ffn_hidden_size"], tp),
            "layers": (transformer["num_layers"], pp),
            "experts": (self.experts or 1, ep),
        }


def network_of(config: Config) -> Network:
    """Return the network of a configuration that `unlike` has nothing against."""
    return FAMILIES[config["model_type"]].make(config)


def unlike(config: Config) -> str | None:
    """Return why Megatron-Core's layers cannot make this network; None if they can."""
    kind = str(config.get("model_type") or "this model")
    if config.get(LATENT):
        return f"the attention of {kind} is multi-latent, which Megatron-Core builds with Transformer Engine alone"
    family = FAMILIES.get(kind)
    if family is None:
        return f"it trains networks of its own; of {kind} there is none here"
    missing = [name for name in family.needed if not isinstance(config.get(name), int)]
    if missing:
        return f"the configuration does not say {', '.join(missing)}"
    unknown = [name for name in family.unknown if config.get(name)]
    if unknown:
        return f"its own {kind} knows no {', '.join(unknown)}"
    activation = config.get(family.activation[0])
    if activation not in (None, family.activation[1]):
        return f"its own {kind} has {family.activation[1]} as {family.activation[0]}, and this one {activation}"
    scaling = _scaling(config)
    return None if scaling in ROTARY else f"its rotary positions know no scaling {scaling}"


@dataclass(frozen=True, kw_only=True)
class _Family:
    """The networks of one `model_type`."""

    make: Callable[[Config], Network]
    needed: tuple[str, ...]
    """Fields that a configuration must have: transformers' default is another for each family."""
    unknown: tuple[str, ...] = ()
    """Options that the network must not have switched on."""
    activation: tuple[str, str] = ("hidden_act", "silu")
    """The configuration's name of the activation, and the one that Megatron-Core has."""


def _rotation(config: Config) -> Mapping[str, Any]:
    """Return the configuration's section of rotary positions.

    Newer configurations have all of them in one section, older ones only their scaling.
    """
    section = config.get("rope_parameters") or config.get("rope_scaling")
    return section if isinstance(section, Mapping) else {}


def _scaling(config: Config) -> str:
    rotation = _rotation(config)
    return str(rotation.get("rope_type") or rotation.get("type") or "default")


def _rotary(config: Config) -> dict[str, Any]:
    rotation = _rotation(config)
    both = {**config, **rotation}
    scaled = {
        "llama3": {"rope_scaling": True, "rope_scaling_factor": rotation.get("factor")},
        "linear": {"seq_len_interpolation_factor": rotation.get("factor")},
    }
    return {
        "position_embedding_type": "rope",
        "rotary_base": both.get("rope_theta", 10_000.0),
        "rotary_percent": both.get("partial_rotary_factor", 1.0),
        **scaled.get(_scaling(config), {}),
    }


def _decoder(config: Config, **more: Any) -> Network:
    """Return a Llama with `more` settings: RMSNorm, grouped queries, rotary positions, a gated MLP without biases."""
    heads = config["num_attention_heads"]
    return Network(
        transformer={
            "num_layers": config["num_hidden_layers"],
            "hidden_size": config["hidden_size"],
            "ffn_hidden_size": config["intermediate_size"],
            "num_attention_heads": heads,
            "num_query_groups": config.get("num_key_value_heads") or heads,
            "kv_channels": config.get("head_dim"),
            "normalization": "RMSNorm",
            "layernorm_epsilon": config.get("rms_norm_eps", 1e-6),
            "gated_linear_unit": True,
            "activation_func": "silu",
            "add_bias_linear": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            **more,
        },
        gpt={"share_embeddings_and_output_weights": bool(config.get("tie_word_embeddings")), **_rotary(config)},
        words=config["vocab_size"],
    )


def _mistral(config: Config, **more: Any) -> Network:
    """Return a Llama that may have a window: a token of a window of W sees itself and W - 1 before it."""
    window = config.get("sliding_window")
    return _decoder(config, **({"window_size": (window - 1, 0)} if window else {}), **more)


def _mixtral(config: Config) -> Network:
    return _mistral(config, **_experts(config, config["num_local_experts"], config["intermediate_size"]))


def _qwen_moe(config: Config, **more: Any) -> Network:
    """Return a Llama with experts in each `decoder_sparse_step`-th layer that is not listed as dense."""
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    kinds = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(config["num_hidden_layers"])]
    return _decoder(
        config,
        **_experts(config, config["num_experts"], config["moe_intermediate_size"]),
        moe_layer_freq=kinds,
        moe_router_pre_softmax=not config.get("norm_topk_prob"),
        **more,
    )


def _experts(config: Config, experts: int, width: int) -> dict[str, Any]:
    """Return settings of experts as in Megatron-Core's MoE quick start (its README of transformer/moe).

    Left out is what needs CUTLASS or Transformer Engine: products of several experts in one kernel, and fused
    permutation.
    """
    return {
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": width,
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": config.get("router_aux_loss_coef", AUXILIARY_LOSS),
        "moe_token_dispatcher_type": "alltoall",
    }


def _qwen2_moe(config: Config) -> Network:
    return _qwen_moe(
        config,
        add_qkv_bias=config.get("qkv_bias", True),
        moe_shared_expert_intermediate_size=config["shared_expert_intermediate_size"],
        moe_shared_expert_gate=True,
    )


def _gpt2(config: Config) -> Network:
    """Return a GPT-2: learned positions, layer norms and biases; its three dropouts are two in Megatron-Core."""
    width, positions = config["n_embd"], config["n_positions"]
    return Network(
        transformer={
            "num_layers": config["n_layer"],
            "hidden_size": width,
            "ffn_hidden_size": config.get("n_inner") or 4 * width,
            "num_attention_heads": config["n_head"],
            "num_query_groups": config["n_head"],
            "normalization": "LayerNorm",
            "layernorm_epsilon": config.get("layer_norm_epsilon", 1e-5),
            "activation_func": "gelu",
            "hidden_dropout": config.get("resid_pdrop", 0.1),
            "attention_dropout": config.get("attn_pdrop", 0.1),
        },
        gpt={
            "share_embeddings_and_output_weights": bool(config.get("tie_word_embeddings", True)),
            "position_embedding_type": "learned_absolute",
        },
        words=config["vocab_size"],
        positions=positions,
    )


_SHAPES: Final = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_GROUPED: Final = (*_SHAPES, "num_key_value_heads")
_QWEN: Final = (*_GROUPED, "num_experts", "num_experts_per_tok", "moe_intermediate_size")

FAMILIES: Final[Mapping[str, _Family]] = {
    "llama": _Family(make=_decoder, needed=_SHAPES, unknown=("attention_bias", "mlp_bias")),
    "mistral": _Family(make=_mistral, needed=_GROUPED),
    "qwen2": _Family(
        make=lambda config: _decoder(config, add_qkv_bias=True), needed=_GROUPED, unknown=("use_sliding_window",)
    ),
    "qwen3": _Family(
        make=lambda config: _decoder(config, qk_layernorm=True),
        needed=(*_GROUPED, "head_dim"),
        unknown=("attention_bias", "use_sliding_window"),
    ),
    "mixtral": _Family(make=_mixtral, needed=(*_GROUPED, "num_local_experts", "num_experts_per_tok")),
    "qwen2_moe": _Family(
        make=_qwen2_moe, needed=(*_QWEN, "shared_expert_intermediate_size"), unknown=("use_sliding_window",)
    ),
    "qwen3_moe": _Family(
        make=lambda config: _qwen_moe(config, qk_layernorm=True),
        needed=(*_QWEN, "head_dim"),
        unknown=("attention_bias", "use_sliding_window"),
    ),
    "gpt2": _Family(
        make=_gpt2,
        needed=("vocab_size", "n_embd", "n_layer", "n_head", "n_positions"),
        unknown=("add_cross_attention", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"),
        activation=("activation_function", "gelu_new"),
    ),
}
"""The networks that Megatron-Core's layers can make, by `model_type`."""
