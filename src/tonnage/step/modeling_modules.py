"""The modules of transformers with a network's code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

NAMES: Final = "transformers.models.auto.configuration_auto"
"""The module that knows in which folder the code of a model type is."""


def list_modules(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the modules with the code of a network and of its parts, whether they exist or not.

    Several types share a folder (`gemma3_text` is in `gemma3`).  Raises ImportError if transformers cannot tell.
    """
    kinds = dict.fromkeys(_model_types(config))
    if not kinds:
        return ()
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    names = (name for name in map(model_type_to_module_name, kinds) if name.isidentifier())
    return tuple(f"transformers.models.{name}.modeling_{name}" for name in names)


def _model_types(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the type of a network and the types of its parts."""
    if isinstance(config.get("model_type"), str):
        yield config["model_type"]
    for part in config.values():
        if isinstance(part, Mapping):
            yield from _model_types(part)
