"""Decisions about a network that its configuration does not make, one sentence each, for the report."""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakKeyDictionary

_REMARKS: Final[WeakKeyDictionary[Any, dict[str, None]]] = WeakKeyDictionary()


def remark(network: Any, sentence: str) -> None:
    """Keep a sentence about the network for as long as it lives; the same one is kept once."""
    _REMARKS.setdefault(network, {})[sentence] = None


def list_remarks() -> tuple[str, ...]:
    """Return all sentences about the networks of this process."""
    return tuple(dict.fromkeys(sentence for sentences in _REMARKS.values() for sentence in sentences))
