"""The network of a job, by reference: a Hugging Face configuration, or a factory that is called to build it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

SCRIPT_SUFFIXES: Final = (".py", ".sh")
"""Ends of names of programs, which no model has."""


@dataclass(frozen=True, kw_only=True)
class ModelRef:
    """Reference to a network that can be built without memory: its configuration, or a factory."""

    name: str
    """Name that the user gave, or the catalog's name."""
    kind: Literal["config", "factory"]
    """`config`: a Hugging Face configuration; `factory`: `package.module:callable` that returns an nn.Module."""
    config: dict[str, Any] = field(default_factory=dict, repr=False)
    """Hugging Face configuration as in config.json (with `model_type`); empty for a factory."""
    factory: str | None = None
    """`package.module:callable`; imported only in the process that builds the model."""
    source: str = field(default="", repr=False)
    """Origin of the configuration: catalog with URL, a path, or a Hub id."""
    dropped: tuple[str, ...] = field(default=(), repr=False)
    """Fields of a file that were left out, because they could load code or files (`catalog.untrusted`)."""

    @property
    def text(self) -> Mapping[str, Any]:
        """Return the configuration of the text model: the part `text_config`, or the whole."""
        return text_part(self.config)

    @property
    def positions(self) -> int | None:
        """Return the longest text in tokens that the configuration states; None where it states none."""
        lengths = (self.text[name] for name in _LENGTH_FIELDS if self.text.get(name))
        longest = next(lengths, None)
        return longest if isinstance(longest, int) else None


_LENGTH_FIELDS: Final = ("max_position_embeddings", "n_positions", "max_target_positions")
"""Fields that state the longest text; `max_target_positions` is that of speech networks, for the text they write."""


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the `text_config` of a configuration, or all of it where there is none.

    A file from elsewhere may hold anything under that name; only a dict that is not empty counts.
    """
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) and inner else config
