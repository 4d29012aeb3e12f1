"""Readers for the settings of a trainer's file.

A FileFormat describes the file of one trainer in three parts:

- `marks`: the keys by which the file is recognised
- `keys`: a reader for each key that sets options by itself
- `read`: one function for the settings that follow from several keys together

    >>> number("micro_batch")(4)
    {'micro_batch': 4}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any


class UnsupportedValue(Exception):
    """Raised for a value that tonnage does not support; the key is listed as not understood."""


class InvalidValue(Exception):
    """Raised for a value that the trainer itself would refuse; the message says which values are possible."""


KeyReader = Callable[[Any], Mapping[str, Any]]
"""Returns the options that a key's value sets.  Raises UnsupportedValue or InvalidValue."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The value of an option, as one or several keys of a file set it."""

    option: str
    value: Any
    key: str
    guess_reason: str | None = None
    """The reason why the value is a guess: what the file leaves out, and how to correct it.  None: it is no guess."""


@dataclass(frozen=True, kw_only=True)
class FileFormat:
    """The settings file of one trainer."""

    target: str
    """The trainer's name."""
    marks: tuple[str, ...]
    """Keys by which its file is recognised."""
    keys: Mapping[str, KeyReader]
    """The reader of each key, by its dotted name."""
    read: Callable[[Mapping[str, Any]], Iterator[Setting]]
    """Yields the settings that follow from several keys together; takes the whole file by dotted names."""
    ignored: Callable[[Mapping[str, Any]], Iterator[str]] = lambda flat: iter(())
    """Yields keys that have a reader but no effect, because other keys of the same file switch them off."""


def number(option: str) -> KeyReader:
    """Return the reader of a whole number above zero."""

    def read(value: Any) -> Mapping[str, Any]:
        if value == "auto" or value is None:
            return {}
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidValue("a whole number above zero")
        return {option: value}

    return read


def fraction(option: str) -> KeyReader:
    """Return the reader of a number from 0 to below 1."""

    def read(value: Any) -> Mapping[str, Any]:
        if value is None:
            return {}
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise InvalidValue("a number from 0 to below 1")
        return {option: float(value)}

    return read


def word(option: str, words: Mapping[Any, Any]) -> KeyReader:
    """Return the reader of one of these words; a word that is mapped to None sets no option."""

    def read(value: Any) -> Mapping[str, Any]:
        if isinstance(value, str) and value.lower() == "auto" and "auto" not in words:
            return {}
        for known, meaning in words.items():
            if known == value and type(known) is type(value):  # True is not 1
                return {} if meaning is None else {option: meaning}
        raise UnsupportedValue

    return read


def read_norm(value: Any) -> Mapping[str, Any]:
    """Return the norm at which gradients are clipped; 0 and an absent value switch clipping off."""
    if value in ("auto", None, 0):
        return {}
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        raise InvalidValue("a number above zero")
    return {"clip_grad_norm": float(value)}


def read_model(value: Any) -> Mapping[str, Any]:
    """Return the model's name."""
    if not isinstance(value, str) or not value:
        raise UnsupportedValue
    return {"model": value}


def read_lora_targets(value: Any) -> Mapping[str, Any]:
    """Return the modules that get adapters."""
    if value in ("all-linear", "all", "all_linear"):
        return {"lora_targets": ("all-linear",)}
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UnsupportedValue
    return {"lora_targets": tuple(name.strip() for name in names)}


def only(*values: Any) -> KeyReader:
    """Return the reader of a key that sets no option and supports these values only; None counts as absent."""

    def read(value: Any) -> Mapping[str, Any]:
        if value is not None and not any(value == known and type(value) is type(known) for known in values):
            raise UnsupportedValue
        return {}

    return read


def read_together(value: Any) -> Mapping[str, Any]:
    """Return no option: `FileFormat.read` reads this key together with others."""
    return {}


def fp32_by_default(key: str) -> Setting:
    """Return fp32 as the precision of a file that sets neither bf16 nor fp16.

    Such a trainer computes in the dtype of the weights.  The file does not name it, so fp32 is a guess.
    """
    guess_reason = "the file sets neither bf16 nor fp16; fp32 is assumed; for bf16 weights add --precision bf16-true"
    return Setting(option="precision", value="fp32", key=key, guess_reason=guess_reason)
