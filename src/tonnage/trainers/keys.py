"""How settings of a trainer's file are read: one key at a time, and several keys together.

A FileFormat is one trainer's: the keys by which its file is known, what each key says, and what several say together.

    >>> number("micro_batch")(4)
    {'micro_batch': 4}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any


class UnsupportedValue(Exception):
    """A value that a key is not known to have."""


class InvalidValue(Exception):
    """A value that a key cannot have; the message says what it can be."""


KeyReader = Callable[[Any], Mapping[str, Any]]
"""Returns the options that a key's value sets; raises UnsupportedValue, or InvalidValue."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An option's value, from one or several keys of a file."""

    option: str
    value: Any
    key: str
    guess_reason: str | None = None
    """Why the value is only likely: what the file leaves out, and what to do, in one line."""


@dataclass(frozen=True, kw_only=True)
class FileFormat:
    """The settings file of one trainer."""

    target: str
    """The trainer's name."""
    marks: tuple[str, ...]
    """Keys by which its file is known."""
    keys: Mapping[str, KeyReader]
    """The reader of each key, by its dotted name."""
    read: Callable[[Mapping[str, Any]], Iterator[Setting]]
    """Yields what several keys say together; takes the whole file by dotted names."""
    ignored: Callable[[Mapping[str, Any]], Iterator[str]] = lambda flat: iter(())
    """Yields keys that have a reader and, beside what else the file says, no meaning here."""


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
    """Return the reader of one of these words; a word whose value is None sets nothing."""

    def read(value: Any) -> Mapping[str, Any]:
        if isinstance(value, str) and value.lower() == "auto" and "auto" not in words:
            return {}
        for known, meaning in words.items():
            if known == value and type(known) is type(value):  # True is not 1
                return {} if meaning is None else {option: meaning}
        raise UnsupportedValue

    return read


def read_norm(value: Any) -> Mapping[str, Any]:
    """Return the norm to clip at; 0 and an absent value are none."""
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
    """Return the reader of a key that is run with these values alone, which set nothing; None counts as absent."""

    def read(value: Any) -> Mapping[str, Any]:
        if value is not None and not any(value == known and type(value) is type(known) for known in values):
            raise UnsupportedValue
        return {}

    return read


def read_together(value: Any) -> Mapping[str, Any]:
    """Return nothing: `FileFormat.read` reads the key together with others."""
    return {}


def fp32_by_default(key: str) -> Setting:
    """Return fp32 as the likely precision of a file without bf16 and fp16.

    Then all is computed in the dtype of the weights, which such a file does not have.
    """
    guess_reason = (
        "neither bf16 nor fp16 is set; weights are taken to be fp32, and if they are not: --precision bf16-true"
    )
    return Setting(option="precision", value="fp32", key=key, guess_reason=guess_reason)
