"""Bounds on what a saved estimate may hold, so that a small file cannot keep a reader busy.

A report has tens of lines; no honest one comes near these bounds.  Lists of numbers may be long, texts may not: a
terminal's lines take a millisecond each to break.
"""

from collections.abc import Mapping
from typing import Any, Final

from tonnage.errors import UnreadableFile

_MOST_ENTRIES: Final = 1_000
"""Entries of a list or an object."""

_LONGER: Final[Mapping[str, int]] = {"steps": 100_000, "curve": 20_000, "ranks": 20_000}
"""Fields of an estimate with more entries than that: one for each step, moment and rank."""

_WITHOUT_WORDS: Final = ("steps", "curve", "ranks")
"""Fields whose texts are names of phases and categories, which are not counted."""

_LONGEST_TEXT: Final = 65_536
_MOST_TEXT: Final = 200_000
"""Characters of all texts together."""

_MOST_LEVELS: Final = 20


def check_amounts(document: Any) -> None:
    """Check the counts, lengths and depth of a document of JSON.  Raises UnreadableFile with the field."""
    characters = 0
    level: list[tuple[str, Any]] = [("the estimate", document)]
    for _ in range(_MOST_LEVELS):
        deeper: list[tuple[str, Any]] = []
        for where, value in level:
            if isinstance(value, str):
                _check(where, "characters", len(value), _LONGEST_TEXT)
                characters += 0 if where in _WITHOUT_WORDS else len(value)
            elif isinstance(value, list):
                _check(where, "entries", len(value), _LONGER.get(where, _MOST_ENTRIES))
                deeper += [(where, item) for item in value]
            elif isinstance(value, dict):
                _check(where, "fields", len(value), _MOST_ENTRIES)
                characters += 0 if where in _WITHOUT_WORDS else sum(map(len, value))
                deeper += [(name if value is document else where, item) for name, item in value.items()]
        if not deeper:
            _check("its texts together", "characters", characters, _MOST_TEXT)
            return
        level = deeper
    raise UnreadableFile(f"The saved estimate is nested more than {_MOST_LEVELS} levels deep.")


def _check(where: str, what: str, count: int, most: int) -> None:
    if count > most:
        raise UnreadableFile(
            f"The saved estimate is none of tonnage: {where} has {count:,} {what}, of at most {most:,}."
        )
