"""Shapes of encoders of text: BERT and its relatives, and ModernBERT."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from tonnage.timing.classics import classic_shape
from tonnage.timing.shape import Shape


def _bert(config: Mapping[str, Any]) -> Shape:
    """Return the Shape of BERT or of a relative whose code differs in names alone."""
    h = config["hidden_size"]
    head = h * h + h + 2 * h + config["vocab_size"]  # transform, its norm, bias of the words
    positions = config.get("max_position_embeddings", 512) + config.get("type_vocab_size", 2)
    if config["model_type"] == "ernie" and config.get("use_task_id"):
        positions += config.get("task_type_vocab_size", 3)
    return classic_shape(
        config,
        ends_in_norm=True,
        causal=False,
        tied=bool(config.get("tie_word_embeddings", True)),
        positions=positions,
        biases="all",
        extra_parameters=head,  # the norm after the embedding counts as the final one that BERT lacks
    )


def _electra(config: Mapping[str, Any]) -> Shape:
    """Return the Shape of ELECTRA, whose words may be narrower than its layers."""
    shape, h, narrow = _bert(config), config["hidden_size"], config.get("embedding_size") or config["hidden_size"]
    words = config["vocab_size"] + config.get("max_position_embeddings", 512) + config.get("type_vocab_size", 2)
    between = h * narrow + narrow + config["vocab_size"] + 2 * narrow - 2 * h + 2 * narrow
    between += (narrow * h + h) if narrow != h else 0
    return replace(shape, extra_parameters=words * (narrow - h) + between)


def _distilbert(config: Mapping[str, Any]) -> Shape:
    """Return the Shape of DistilBERT."""
    h = config["dim"]
    return classic_shape(
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
    """Return the Shape of ModernBERT; two of three layers see a window.

    Its configurations may leave out the usual values.
    """
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


_BERTS: Final = ("bert", "roberta", "xlm-roberta", "camembert", "data2vec-text", "ernie")

ENCODERS: Final[dict[str, Callable[[Mapping[str, Any]], Shape]]] = {
    **dict.fromkeys(_BERTS, _bert),
    **{"electra": _electra, "distilbert": _distilbert, "modernbert": _modernbert},
}
"""Readers of the configurations of encoders, by kind."""
