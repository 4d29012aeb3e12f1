"""Errors of transformers about a configuration, told as one line that names the field at fault."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

SEARCH_SECONDS: Final = 5.0
"""Longest search for the field by which a configuration fails."""

NOT_BUILT: Final = "would need for --attention"
"""Part of the message if transformers has no such attention for a network."""


def describe(error: Exception, fields: dict[str, Any], attempt: Callable[[dict[str, Any]], Any]) -> str:
    """Return the error's message, with the field that causes it if the message names none.

    For a word that a table of transformers lacks, that is the field that holds it; else the first field without which
    `attempt` raises nothing.
    """
    if isinstance(error, KeyError) and error.args:
        named = list(_fields_that_hold(error.args[0], fields))
        return f"{', '.join(named)} is {error}, which is not known there" if named else f"KeyError: {error}"
    message = first_line(error)
    if any(name in message for name in fields):
        return message
    culprit = _field_at_fault(fields, attempt)
    return (
        message if culprit is None else f"{message} ({culprit} is {_shorten(fields[culprit])}; without it, it works)"
    )


def _field_at_fault(fields: dict[str, Any], attempt: Callable[[dict[str, Any]], Any]) -> str | None:
    """Return the first field that may be left out and without which `attempt` works; None after some seconds."""
    until = time.monotonic() + SEARCH_SECONDS
    for name in fields:
        without = {other: value for other, value in fields.items() if other != name}
        if name != "model_type" and works(attempt, without):
            return name
        if time.monotonic() > until:
            return None
    return None


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _fields_that_hold(wanted: Any, fields: dict[str, Any]) -> Iterator[str]:
    """Yield the names of fields that equal or contain a value; those of nested configurations with a prefix."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from (f"{name}.{inner}" for inner in _fields_that_hold(wanted, value))
        elif value == wanted or (isinstance(value, list) and wanted in value):
            yield name


def works(attempt: Callable[..., Any], *arguments: Any) -> bool:
    """Return True if the call raises nothing."""
    try:
        attempt(*arguments)
    except Exception:  # transformers raises any class
        return False
    return True


def first_line(error: Exception) -> str:
    """Return the error's first line; with the second if the first ends with a colon."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
