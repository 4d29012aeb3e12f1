"""Configuration objects of transformers: made from the fields of a config.json, and completed for training."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tonnage.step.heads import Head


_LAYERDROPS: Final = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "speech_encoder_layerdrop")
"""Fields with the probability that a layer is skipped in training."""


def make(config: dict[str, Any]) -> Any:
    """Return transformers' configuration object for the fields of a config.json."""
    from transformers import AutoConfig

    fields = {key: copy.deepcopy(value) for key, value in config.items() if not key.startswith("_")}
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def complete_for_training(config: Any, head: Head, fields: dict[str, Any]) -> list[str]:
    """Complete the configuration for training; return sentences on what that changes."""
    notes = _fill_in(config, head.task)
    _tie_as_text(config, fields)
    return notes


def _fill_in(config: Any, kind: str) -> list[str]:
    """Set what training needs and a published configuration may leave out; return sentences on what that changes."""
    text, parts = text_config(config), _with_parts(config)
    disable_cache(config)
    if kind in ("seq2seq", "speech-seq2seq", "image-text-to-text") and _is_encoder_decoder(config):
        for part in (config, text):
            if getattr(part, "pad_token_id", None) is None:
                part.pad_token_id = 0
            if getattr(part, "decoder_start_token_id", None) is None:
                part.decoder_start_token_id = part.pad_token_id
    if kind == "sequence-classification" and getattr(text, "pad_token_id", None) is None:
        text.pad_token_id = config.pad_token_id = 0  # to find the last token of a row
    if getattr(config, "languages", None) and getattr(config, "default_language", "") is None:
        config.default_language = config.languages[0]  # X-MOD: adapters of one language are trained
    dropped = [(part, name) for part in parts for name in _LAYERDROPS if getattr(part, name, None)]
    for part, name in dropped:
        setattr(part, name, 0.0)
    return ["layerdrop drops no layer: the step that needs most"] if dropped else []


def disable_cache(config: Any) -> None:
    """Turn off the cache of keys and values, which training does not use."""
    text = text_config(config)
    for part in (text, *_with_parts(config)):
        if part is text or hasattr(part, "use_cache"):
            part.use_cache = False


def read_caches(network: Any) -> list[tuple[Any, bool]]:
    """Return each configuration of a transformers network that says whether it has a cache, and what it says.

    Parts may have a configuration of their own: T5's decoder.
    """
    configs = (network.config, *(getattr(module, "config", None) for module in network.modules()))
    found = {id(part): part for config in configs if config is not None for part in _with_parts(config)}
    return [(part, part.use_cache) for part in found.values() if hasattr(part, "use_cache")]


def disable_caches(network: Any) -> list[tuple[Any, bool]]:
    """Turn off the caches of a transformers network, and return what `read_caches` did before."""
    held = read_caches(network)
    disable_cache(network.config)
    restore_caches([(config, False) for config, _ in held])
    return held


def restore_caches(held: list[tuple[Any, bool]]) -> None:
    """Say in each configuration whether it has a cache."""
    for config, value in held:
        config.use_cache = value


def _tie_as_text(config: Any, stated: dict[str, Any]) -> None:
    """Take `tie_word_embeddings` from the text model's configuration if the whole one does not state it.

    Some families default to true for the whole and false for the text model; transformers does not tie checkpoints
    that then hold both weights when it loads them (modeling_utils, tie_weights).
    """
    text: Any = getattr(config, "text_config", None)
    if "tie_word_embeddings" not in stated and hasattr(text, "tie_word_embeddings"):
        config.tie_word_embeddings = text.tie_word_embeddings


def _is_encoder_decoder(config: Any) -> bool:
    return bool(getattr(config, "is_encoder_decoder", False)) or config.model_type.endswith("encoder-decoder")


def _with_parts(config: Any) -> list[Any]:
    """Return the configuration and those of its parts."""
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return [config, *(part for part in inner if part is not None)]


def text_config(config: Any) -> Any:
    """Return the configuration of the text model, that of the decoder if there are several."""
    try:
        return config.get_text_config()
    except ValueError:  # several parts are text models
        return config.get_text_config(decoder=True)


def part_for(config: Any, model_class: Any) -> Any:
    """Return the part of the configuration that the class is made from, for a text model listed with the whole."""
    config_class = model_class.config_class
    if isinstance(config, config_class):
        return config
    return next((part for part in _with_parts(config) if isinstance(part, config_class)), config)
