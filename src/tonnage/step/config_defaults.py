"""Sizes that a configuration leaves out: transformers' defaults replace them, and the report says so."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Final

SIZES: Final = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Fields that decide how large a network is, in transformers' common names."""


def describe_unstated_sizes(config: Any, fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each part of the built configuration whose sizes the written fields leave out."""
    for name in ("", *getattr(type(config), "sub_configs", {})):
        part = getattr(config, name, None) if name else config
        written = fields.get(name) if name else fields
        if part is None or not isinstance(written, Mapping):
            continue
        if left_out := _default_sizes(part, {*fields, *written}):
            sizes = ", ".join(f"{size} {value:,}" for size, value in left_out.items())
            where = f"{name} of the configuration" if name else "the configuration"
            yield f"{where} leaves out {', '.join(left_out)}: {sizes}, as in transformers"


def _default_sizes(part: Any, given: set[str]) -> dict[str, int]:
    """Return the sizes, by their own names, that the class has defaults for and the fields do not give."""
    accepted = inspect.signature(type(part).__init__).parameters
    own_names = getattr(type(part), "attribute_map", {})
    names = {size: own_names.get(size, size) for size in SIZES}
    return {
        own: value
        for size, own in names.items()
        if own in accepted and not {size, own} & given and isinstance(value := getattr(part, own, None), int)
    }
