"""A reference to a network that can be built without memory: a Hugging Face configuration, or a factory."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal


@dataclass(frozen=True, kw_only=True)
class ModelRef:
    """A network that can be built without memory: a configuration, or a factory to be called."""

    name: str
    """The name that the user gave, or the catalog's."""
    kind: Literal["config", "factory"]
    """`config`: a Hugging Face configuration; `factory`: `package.module:callable` returning an nn.Module."""
    config: dict[str, Any] = field(default_factory=dict)
    """The Hugging Face configuration as in config.json (with `model_type`); empty for a factory."""
    factory: str | None = None
    """`package.module:callable`; imported only in the process that builds the model."""
    source: str = ""
    """Origin of the configuration: catalog with URL, a path, or a Hub id."""

    @property
    def text(self) -> Mapping[str, Any]:
        """Return the configuration of the text model: a part of its own, or all."""
        return text_part(self.config)

    @property
    def positions(self) -> int | None:
        """Return the configuration's longest text in tokens; None if it names no such number."""
        stated = (self.text[name] for name in _LONGEST_TEXT_FIELDS if self.text.get(name))
        longest = next(stated, None)
        return longest if isinstance(longest, int) else None


_LONGEST_TEXT_FIELDS: Final = ("max_position_embeddings", "n_positions", "max_target_positions")
"""Fields with the longest text; the last one is that of speech models, for their transcripts."""


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a configuration that describes its text model, or all of it.

    An unknown configuration may hold anything under `text_config`.
    """
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) and inner else config
