"""A script's command line with other values, in its own flags, by the names that its parser knows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def flag(name: str, options: Mapping[str, Any], command: Sequence[str] = ()) -> str | None:
    """The flag that sets `name`, as the command has it or else as the parser calls it; None where there is none."""
    names = [option for option, known in options.items() if known["dest"] == name and option.startswith("--")]
    positive = [option for option in names if not option.startswith("--no")] or names
    used = [option for option in positive if any(_is(word, option) for word in command)]
    return next(iter(used or positive), None)


def can_say(name: str, value: Any, options: Mapping[str, Any], command: Sequence[str]) -> bool:
    """Whether a flag can give this value to `name`."""
    found = flag(name, options, command)
    if found is None:
        return False
    kind = options[found]["action"]
    if kind == "storetrue":
        return value is True or (value in (False, None) and _place(found, command) is not None)
    if kind == "storefalse":
        return value is False
    return kind == "store" and (value is not None or _place(found, command) is not None)


def with_value(command: Sequence[str], name: str, value: Any, options: Mapping[str, Any]) -> list[str]:
    """The command with a flag's value changed where it stands, or put at the end; None takes it away."""
    found = flag(name, options, command)
    assert found is not None
    words = _without(list(command), found, options[found])
    if value is None:
        return words
    kind = options[found]["action"]
    if kind in ("storetrue", "storefalse"):
        return [*words, found] if (kind == "storetrue") == value else words
    if value is True and options[found]["nargs"] == "?":  # what is left out then means more than any text
        return [*words, found]
    place = _place(found, command)
    said = [found, spelled(value)]
    return [*words, *said] if place is None else [*words[:place], *said, *words[place:]]


def spelled(value: Any) -> str:
    """A value as a command line has it: JSON for what has parts."""
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _is(word: str, option: str) -> bool:
    return word == option or word.startswith(f"{option}=")


def _place(option: str, command: Sequence[str]) -> int | None:
    return next((place for place, word in enumerate(command) if _is(word, option)), None)


def _without(command: list[str], option: str, known: Mapping[str, Any]) -> list[str]:
    """The command without a flag and its value, wherever it stands."""
    while (place := _place(option, command)) is not None:
        end = place + 1
        follows = command[place] == option and end < len(command) and not command[end].startswith("--")
        if follows and known["action"] == "store" and known["nargs"] in (None, "?", 1):
            end += 1
        command = command[:place] + command[end:]
    return command
