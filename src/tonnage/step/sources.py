"""Where transformers keeps the code of a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

NAMES: Final = "transformers.models.auto.configuration_auto"
"""The module that knows in which folder the code of a type of model is."""


def modules(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Modules with the code of a network and of those it is made of, whether they exist or not.

    Several types share a folder (`gemma3_text` is among `gemma3`).  Raises ImportError if transformers cannot say.
    """
    kinds = dict.fromkeys(_kinds(config))
    if not kinds:
        return ()
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    names = (name for name in map(model_type_to_module_name, kinds) if name.isidentifier())
    return tuple(f"transformers.models.{name}.modeling_{name}" for name in names)


def _kinds(config: Mapping[str, Any]) -> Iterator[str]:
    """The type of a network, and the types of the networks that it is made of."""
    if isinstance(config.get("model_type"), str):
        yield config["model_type"]
    for part in config.values():
        if isinstance(part, Mapping):
            yield from _kinds(part)
