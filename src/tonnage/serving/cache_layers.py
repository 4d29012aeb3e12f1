"""Memory that each layer of a network keeps of a request, read from its Hugging Face configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from tonnage.catalog.families import types_with
from tonnage.errors import CannotEstimate, UsageError
from tonnage.model import text_part
from tonnage.serving.kv_cache import LayerCache, heads_on_rank
from tonnage.serving.state_layers import read_state

_ENCODERS: Final = ("bert", "roberta", "modernbert", "electra", "distilbert", "mpnet", "vit", "siglip", "clip")
"""Beginnings of the names of types that attend in both directions and keep nothing of a request."""

_PAIRS: Final = ("t5", "mt5", "bart", "whisper", "mbart", "pegasus", "m2m_100", "marian")
"""Encoder-decoders: their decoder also keeps the encoder's keys and values."""

_STATE_WORDS: Final = ("linear_attention", "mamba", "mamba2", "M", "recurrent", "conv", "short_conv", "linear")
_WINDOW_WORDS: Final = ("sliding_attention", "local", "sliding")
_CHUNK_WORDS: Final = ("chunked_attention",)
_FULL_WORDS: Final = ("full_attention", "attention", "*", "global", "hybrid")
"""Words of `layer_types`, `layers_block_type` and patterns."""

_NOTHING_WORDS: Final = ("mlp", "moe", "-", "E")
"""Layers of a hybrid that are feed-forward networks alone."""


def read_layers(
    config: Mapping[str, Any],
    *,
    element_bytes: float,
    tp: int = 1,
    frees_chunks: bool = False,
    drafted: int = 0,
) -> tuple[LayerCache, ...]:
    """Return what each layer keeps on one tensor-parallel rank, for keys and values of so many bytes an element.

    `frees_chunks`: layers that attend within chunks keep the last one alone, as vLLM does since 0.13, and not all.

    States keep the network's own dtype (2 bytes) unless the configuration states `mamba_ssm_dtype`.  Raises
    CannotEstimate for a network whose cache is not known, UsageError for heads that `tp` does not divide.
    """
    text = text_part(config)
    kind = str(text.get("model_type") or config.get("model_type"))
    if kind.startswith(_ENCODERS):
        return ()
    if kind.startswith(_PAIRS):
        raise CannotEstimate(
            f"The KV cache of a {kind!r} network, an encoder with a decoder, is not known; run its engine: "
            "tonnage dry-run --gpu NAME -- vllm serve MODEL."
        )
    try:
        return tuple(_read(text, kind, element_bytes, tp, frees_chunks, drafted))
    except KeyError as missing:
        raise CannotEstimate(f"The configuration of this {kind} network does not say {missing}.") from None
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise CannotEstimate(f"The KV cache of this {kind} network cannot be read ({error}).") from None
    except ValueError as error:
        raise UsageError(f"--tp {tp}: {error}.") from None


def _read(
    text: Mapping[str, Any], kind: str, element_bytes: float, tp: int, frees_chunks: bool, drafted: int
) -> list[LayerCache]:
    words = _layer_words(text, kind)
    found = []
    for word in words:
        if word in _NOTHING_WORDS:
            continue
        if word in _STATE_WORDS:
            found.append(read_state(text, kind, word, tp, drafted))
        elif word in _WINDOW_WORDS:
            found.append(
                LayerCache(
                    kind="window",
                    token_bytes=int(_token_elements(text, tp) * element_bytes),
                    window=_window(text),
                )
            )
        elif word in _CHUNK_WORDS and frees_chunks:
            full = _full_layer(text, element_bytes, tp)
            found.append(replace(full, kind="chunk", window=_tokens_seen(text["attention_chunk_size"])))
        elif word in (*_FULL_WORDS, *_CHUNK_WORDS):
            found.append(_full_layer(text, element_bytes, tp))
        else:
            raise CannotEstimate(f"The KV cache of a layer of the kind {word!r} is not known.")
        if word == "hybrid":  # attention and a state side by side
            found.append(read_state(text, kind, "mamba2", tp, drafted))
    return found


def _token_elements(text: Mapping[str, Any], tp: int) -> int:
    """Return the numbers that a layer of plain attention keeps of a token."""
    heads = text.get("num_attention_heads") or text["n_head"]
    kv_heads = text.get("num_key_value_heads") or text.get("num_kv_heads") or heads
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        kv_heads = 1
    width = text.get("head_dim") or text.get("attention_head_dim")
    width = width or (text.get("hidden_size") or text["n_embd"]) // heads
    return int(heads_on_rank(kv_heads, tp) * (width + (text.get("v_head_dim") or width)))


def _full_layer(text: Mapping[str, Any], element_bytes: float, tp: int) -> LayerCache:
    """Return a layer that keeps all tokens: a latent vector on every rank, or the keys and values of its heads.

    In some networks (Gemma 4) the heads of such layers are wider than those with a window.
    """
    width = text.get("global_head_dim")
    if text.get("kv_lora_rank"):
        elements = text["kv_lora_rank"] + text["qk_rope_head_dim"]
    elif width:
        heads = text.get("num_global_key_value_heads") or text["num_key_value_heads"]
        elements = 2 * heads_on_rank(heads, tp) * width
    else:
        elements = _token_elements(text, tp)
    return LayerCache(kind="full", token_bytes=int(elements * element_bytes))


def _window(text: Mapping[str, Any]) -> int:
    return _tokens_seen(text.get("sliding_window") or text.get("attention_chunk_size") or text.get("window_size"))


def _tokens_seen(window: Any) -> int:
    """Return the tokens of a window or chunk.  Raises CannotEstimate for anything but a number."""
    if not isinstance(window, int) or window < 1:
        raise CannotEstimate(f"The configuration has layers with a sliding window of {window!r} tokens.")
    return window


def _layer_words(text: Mapping[str, Any], kind: str) -> Sequence[str]:
    """Return a word for each layer: that of its list, or what the type's code makes of other fields."""
    for name in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        listed = text.get(name)
        if isinstance(listed, list | str) and listed:
            return list(listed)
    if kind == "gpt2" or "n_layer" in text:
        layers = text.get("n_layer") or text["num_hidden_layers"]
    else:
        layers = text.get("num_hidden_layers") or text["num_layers"]
    if "attn_layer_period" in text:  # Jamba
        period, offset = text["attn_layer_period"], text.get("attn_layer_offset", 0)
        return ["full_attention" if index % period == offset else "mamba" for index in range(layers)]
    if kind in ("mamba", "mamba2", "falcon_mamba"):
        return [kind.replace("falcon_", "")] * layers
    if kind == "falcon_h1":
        return ["hybrid"] * layers
    if text.get("attention_chunk_size"):  # Llama 4: layers without rotations see all
        every, listed = text.get("no_rope_layer_interval") or 4, text.get("no_rope_layers")
        rotates = listed if listed else [(index + 1) % every for index in range(layers)]
        return ["chunked_attention" if rotated else "full_attention" for rotated in rotates]
    if text.get("full_attention_interval"):  # Qwen3-Next
        every = text["full_attention_interval"]
        return ["full_attention" if (index + 1) % every == 0 else "linear_attention" for index in range(layers)]
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return ["full_attention"] * layers
    period = text.get("sliding_window_pattern") or text.get("_sliding_window_pattern") or _known_period(kind)
    if not isinstance(period, int) or period < 1:
        return ["sliding_attention"] * layers
    return ["full_attention" if (index + 1) % period == 0 else "sliding_attention" for index in range(layers)]


def _known_period(kind: str) -> int | None:
    """Return after how many layers one of a type has full attention; None where all are alike."""
    periods = types_with("layer_period")
    family = next((name for name in periods if kind == name or kind.startswith((f"{name}_", f"{name}-"))), None)
    return None if family is None else int(periods[family])
