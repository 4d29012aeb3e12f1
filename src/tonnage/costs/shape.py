"""The dimensions of a Transformer that decide how long it computes, read from a Hugging Face configuration.

Letters used in this package: L layers, h width of the residual stream, f width of the feed-forward network, V words
of the vocabulary, s tokens of a sequence, b sequences of a micro-batch, T = b s tokens, P parameters, t ranks of
tensor parallelism.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Final

from tonnage.errors import CannotEstimate

_LLAMA_LIKE: Final = frozenset(
    {
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "gemma2",
        "gemma3_text",
        "phi3",
        "olmo2",
        "granite",
    }
    | {"deepseek_v2", "deepseek_v3", "gpt_oss"}
)
"""Root-mean-square norms, rotary positions, a gated feed-forward network, fields named as Llama's."""

_NORMS: Final = {"gemma2": 4, "gemma3_text": 4}
"""Norms of a layer where there are not two."""

_NORMED_LAST: Final = ("gemma2", "gemma3_text", "olmo2")
"""Whose layers have a norm after their last product."""

_BIASED: Final = {"qwen2": "qkv", "gpt_oss": "qkvo", "gpt2": "all", "gpt_neox": "all", "opt": "all", "phi": "all"}
_STEPWISE: Final = ("gelu_new", "gelu_fast", "gelu_python")
_DROPOUTS: Final = ("resid_pdrop", "dropout", "hidden_dropout_prob", "hidden_dropout")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One stack of equal Transformer layers between an embedding and a head."""

    layers: int
    """Layers in all."""
    hidden: int
    """Width of the residual stream."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Width of a query or key head."""
    value_dim: int
    """Width of a value head."""
    intermediate: int
    """Inner width of the feed-forward network; of the layers without experts, where there are experts."""
    gated: bool
    """Whether a gate multiplies the inner values: three matrices instead of two."""
    vocab: int
    """Rows of the embedding."""
    tied: bool
    """Whether the head is the embedding."""
    causal: bool = True
    """Whether a token sees only those before it."""
    rms_norm: bool = True
    """Root-mean-square norms, which libraries compute in several kernels; False: layer norms, which torch fuses."""
    ends_in_norm: bool = False
    """Whether a norm follows a layer's last product."""
    norms: int = 2
    """Norms of a layer."""
    head_norms: bool = False
    """Whether queries and keys are normalised."""
    rotary: float = 1.0
    """Part of each head that is rotated by its position; 0: learned positions."""
    positions: int = 0
    """Rows of learned positions."""
    stepwise_activation: bool = False
    """Whether libraries compute the activation in several kernels (GELU by its tanh formula, written out)."""
    squared_activation: bool = False
    """Whether the activation is a squared ReLU."""
    clamped_activation: bool = False
    """Whether both halves of a gated activation are clamped first."""
    predicted: int = 1
    """Tokens that each position predicts, for each of which the head is computed."""
    dropout: bool = False
    """Whether the residual stream is dropped out."""
    biases: str = ""
    """Which matrices have a bias: `qkv`, `qkvo` or `all`."""
    experts: int = 0
    """Routed experts of a layer; 0: none."""
    experts_per_token: int = 0
    """Routed experts that a token goes through."""
    expert_intermediate: int = 0
    """Inner width of a routed expert."""
    shared_intermediate: int = 0
    """Inner width of all shared experts together."""
    dense_layers: int = 0
    """Layers without experts, where there are experts."""
    query_rank: int = 0
    """Width to which queries are compressed (latent attention); 0: not."""
    latent_rank: int = 0
    """Width to which keys and values are compressed; 0: plain attention."""
    rotary_dim: int = 0
    """Of latent attention's key: the part that is rotated, shared by all heads."""
    keeps_scores: bool = False
    """Whether scores are capped or get sinks, for which transformers' code has no attention that keeps none."""
    biased_scores: bool = False
    """Whether scores get a bias, which of the attentions that keep none only the efficient one adds."""
    window: int | None = None
    """Tokens that a windowed layer sees; None: all."""
    window_fraction: float = 0.0
    """Part of the layers that have the window."""
    parts: int = 1
    """Matrices whose parameters are separate in the eager code: 1 where query, key and value are one matrix."""
    extra_parameters: int = 0
    """Parameters outside layers, embedding and head that take no time to speak of."""

    @staticmethod
    def of(config: Mapping[str, Any]) -> "Shape":
        """The Shape of a config.json.  Raises CannotEstimate with one line for a kind it does not know."""
        known = _KNOWN.get(id(config))
        if known is None or known[0] != config:
            if len(_KNOWN) >= _MOST_KNOWN:
                _KNOWN.clear()
            known = _KNOWN[id(config)] = dict(config), Shape._read(config)
        return known[1]

    @staticmethod
    def _read(config: Mapping[str, Any]) -> "Shape":
        kind = config.get("model_type")
        reader = {
            **dict.fromkeys(_LLAMA_LIKE, _llama),
            **{"gpt2": _gpt2, "gpt_neox": _neox, "opt": _opt, "phi": _phi, "bert": _bert, "modernbert": _modernbert},
        }.get(str(kind))
        if reader is None:
            raise CannotEstimate(
                f"The time of a {kind!r} network is not known; its memory is. Known: decoders and BERT."
            )
        try:
            return _usable(reader(config))
        except KeyError as missing:
            raise CannotEstimate(f"The configuration of this {kind} network does not say {missing}.") from None
        except (TypeError, ValueError, ArithmeticError) as error:
            raise CannotEstimate(f"The dimensions of this {kind} network cannot be read ({error}).") from None

    @property
    def query_width(self) -> int:
        """Width of all queries together."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Width of all keys together."""
        return self.kv_heads * self.head_dim

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @cached_property
    def attention_parameters(self) -> int:
        """Weights of one layer's attention, with its biases."""
        h, q, k = self.hidden, self.query_width, self.key_width
        if self.latent_rank:
            values = self.heads * self.value_dim
            compressed = h * self.query_rank + self.query_rank * (q + 1) if self.query_rank else h * q
            keys = self.latent_rank * self.heads * (self.head_dim - self.rotary_dim)
            shared = h * (self.latent_rank + self.rotary_dim) + self.latent_rank
            return compressed + shared + keys + self.latent_rank * values + values * h
        biases = (q + 2 * k if self.biases else 0) + (h if self.biases in ("qkvo", "all") else 0)
        return h * (q + 2 * k) + q * h + biases

    def feed_forward_parameters(self, width: int) -> int:
        """Weights of a feed-forward network of this inner width, with its biases."""
        matrices = 3 if self.gated else 2
        biases = (matrices - 1) * width + self.hidden if self.biases == "all" else 0
        return matrices * self.hidden * width + biases

    @property
    def norm_parameters(self) -> int:
        """Weights of one layer's norms."""
        of_heads = 2 * self.head_dim if self.head_norms else 0
        return self.norms * self.hidden * (1 if self.rms_norm else 2) + of_heads

    @cached_property
    def dense_layer_parameters(self) -> int:
        """Weights of a layer without experts."""
        return self.attention_parameters + self.norm_parameters + self.feed_forward_parameters(self.intermediate)

    @property
    def router_parameters(self) -> int:
        """Weights that choose the experts."""
        return self.experts * (self.hidden + (1 if self.biases == "qkvo" else 0))

    @property
    def expert_biases(self) -> bool:
        """Whether experts' products have biases."""
        return self.experts > 0 and self.biases == "qkvo"

    @cached_property
    def expert_parameters(self) -> int:
        """Weights of one routed expert."""
        bias = 2 * self.expert_intermediate + self.hidden if self.expert_biases else 0
        return self.feed_forward_parameters(self.expert_intermediate) + bias

    @cached_property
    def expert_layer_parameters(self) -> int:
        """Weights of a layer with experts."""
        shared = self.feed_forward_parameters(self.shared_intermediate) if self.shared_intermediate else 0
        around = self.attention_parameters + self.norm_parameters + self.router_parameters + shared
        return around + self.experts * self.expert_parameters

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding of words."""
        return self.vocab * self.hidden

    @cached_property
    def parameters(self) -> int:
        """All weights, ties counted once."""
        layers = (self.layers - self.expert_layers) * self.dense_layer_parameters
        layers += self.expert_layers * self.expert_layer_parameters if self.experts else 0
        outside = self.embedding_parameters * (1 if self.tied else 2) + self.positions * self.hidden
        return layers + outside + self.hidden * (1 if self.rms_norm else 2) + self.extra_parameters

    @property
    def active_parameters(self) -> int:
        """Weights that a token is multiplied with."""
        return self.parameters - self.expert_layers * (self.experts - self.experts_per_token) * self.expert_parameters


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


_MOST_KNOWN: Final = 64
_KNOWN: Final[dict[int, tuple[dict[str, Any], Shape]]] = {}
"""Shapes by the identity of their configuration, with what that said: a search asks for one ten thousand times."""


def _head_dim(config: Mapping[str, Any], heads: int) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // heads)


def _llama(config: Mapping[str, Any]) -> Shape:
    kind, heads = config["model_type"], config["num_attention_heads"]
    tied = {"gemma2": True, "gemma3_text": True}.get(kind, False)
    latent = config.get("kv_lora_rank") or 0
    head_dim = _head_dim(config, heads)
    if latent:
        head_dim = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    window, fraction = _window(config)
    wide_norms = {"olmo2": config["hidden_size"] + (config.get("num_key_value_heads") or heads) * head_dim}
    per_layer_sinks = heads if kind == "gpt_oss" else 0
    extra = config["num_hidden_layers"] * (wide_norms.get(kind, 0) + per_layer_sinks)
    return Shape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        value_dim=config["v_head_dim"] if latent else head_dim,
        intermediate=config["intermediate_size"],
        gated=True,
        vocab=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", tied)),
        ends_in_norm=kind in _NORMED_LAST,
        norms=_NORMS.get(kind, 2),
        head_norms=kind in ("qwen3", "qwen3_moe", "gemma3_text"),
        biases=_BIASED.get(kind, "qkvo" if config.get("attention_bias") else ""),
        parts=1 if kind == "phi3" else 3,
        query_rank=config.get("q_lora_rank") or 0,
        latent_rank=latent,
        rotary_dim=config["qk_rope_head_dim"] if latent else 0,
        keeps_scores=kind == "gpt_oss" or bool(config.get("attn_logit_softcapping")),
        window=window,
        window_fraction=fraction,
        extra_parameters=extra,
        clamped_activation=kind == "gpt_oss",
        **_experts(config),
    )


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Shape that are about experts."""
    experts = next(
        (config[name] for name in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(name)), 0
    )
    if not experts:
        return {}
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    dense = config.get("first_k_dense_replace", 0) + len(config.get("mlp_only_layers") or ())
    if config.get("decoder_sparse_step", 1) != 1 or config.get("moe_layer_freq", 1) != 1:
        raise CannotEstimate("The time of a network with experts in every second layer only is not known.")
    return {
        "experts": experts,
        "experts_per_token": config["num_experts_per_tok"],
        "expert_intermediate": inner,
        "shared_intermediate": inner * (config.get("n_shared_experts") or 0),
        "dense_layers": dense,
    }


def _window(config: Mapping[str, Any]) -> tuple[int | None, float]:
    """Tokens of the sliding window, and the part of the layers that have it."""
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return None, 0.0
    kinds = config.get("layer_types")
    if kinds:
        return window, sum(kind == "sliding_attention" for kind in kinds) / len(kinds)
    if config["model_type"] == "gemma2":
        return window, 0.5
    every = config.get("sliding_window_pattern")
    return window, (every - 1) / every if every else 1.0


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


def _opt(config: Mapping[str, Any]) -> Shape:
    return _classic(
        config,
        intermediate=config["ffn_dim"],
        tied=bool(config.get("tie_word_embeddings", True)),
        positions=config["max_position_embeddings"] + 2,  # OPT's positions begin at 2
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


def _bert(config: Mapping[str, Any]) -> Shape:
    h = config["hidden_size"]
    head = h * h + h + 2 * h + config["vocab_size"]  # transform, its norm, bias of the words
    return _classic(
        config,
        ends_in_norm=True,
        causal=False,
        tied=bool(config.get("tie_word_embeddings", True)),
        positions=config.get("max_position_embeddings", 512) + config.get("type_vocab_size", 2),
        biases="all",
        extra_parameters=head,  # the norm after the embedding stands for the final one that BERT has not
    )


def _modernbert(config: Mapping[str, Any]) -> Shape:
    """ModernBERT, whose configurations may leave out what is usual; two of three layers see a window."""
    h, heads = config.get("hidden_size", 768), config.get("num_attention_heads", 12)
    vocab, every = config.get("vocab_size", 50368), config.get("global_attn_every_n_layers", 3)
    return Shape(
        layers=config.get("num_hidden_layers", 22),
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
        extra_parameters=h * h + vocab,  # the head's own layer, and the bias of the words
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
        or (config["model_type"] == "gpt2" and "activation_function" not in config),
        "biases": "all",
        "parts": 3,
    }
    return Shape(**values | known)
