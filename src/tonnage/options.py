"""Options of a Job and a Plan: fields that carry their help, so that Python and the command line say the same.

A field made by `word`, `number`, `amount`, `fraction`, `names` or `switch` is an option of every command that takes a
request; what it accepts is checked in one place, `check`, with one wording.
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache, lru_cache
from typing import Any, Final, TypeGuard, TypeVar

from tonnage.errors import UsageError
from tonnage.units import parse_bytes

_KEY: Final = "option"
_NUMBER: Final = re.compile(r"-[1-9][0-9]*$")
_Value = TypeVar("_Value")
_AREA: Final = re.compile(r"[1-9][0-9]{0,4}x[1-9][0-9]{0,4}")


@dataclass(frozen=True, kw_only=True)
class Option:
    """What is known about one field beside its name and default."""

    kind: str
    """`word`, `number` (whole), `amount` (x > 0), `fraction` (0 <= x < 1), `names` (a tuple of words) or `switch`."""
    help: str
    """One sentence for the command line."""
    possible: tuple[str, ...] = ()
    """The words that are accepted; `every-N` stands for any whole number, `budget=SIZE` for a number of bytes,
    `cpu=FRACTION` for one between 0 and 1, `WxH` for a width and a height."""
    least: int = 1
    """The smallest number that is accepted."""


def word(default: str | None, help: str, possible: tuple[str, ...]) -> Any:
    """One of several words."""
    return field(default=default, metadata={_KEY: Option(kind="word", help=help, possible=possible)})


def number(default: int | None, help: str, least: int = 1) -> Any:
    """A whole number; None where nothing is asked for."""
    return field(default=default, metadata={_KEY: Option(kind="number", help=help, least=least)})


def amount(default: float | None, help: str) -> Any:
    """Any number above zero; None where nothing is asked for."""
    return field(default=default, metadata={_KEY: Option(kind="amount", help=help)})


def fraction(default: float, help: str) -> Any:
    """A part of something: 0 or more, less than 1."""
    return field(default=default, metadata={_KEY: Option(kind="fraction", help=help)})


def names(default: tuple[str, ...], help: str) -> Any:
    """Any words, with commas between them on the command line."""
    return field(default=default, metadata={_KEY: Option(kind="names", help=help)})


def switch(help: str) -> Any:
    """On or off; off if nothing is said."""
    return field(default=False, metadata={_KEY: Option(kind="switch", help=help)})


def options(kind: type) -> tuple[tuple["Field[Any]", Option], ...]:
    """The fields of a dataclass that are options, in their order."""
    return _options(kind)


@cache
def _options(kind: Any) -> tuple[tuple["Field[Any]", Option], ...]:
    found = [(item, item.metadata[_KEY]) for item in fields(kind) if _KEY in item.metadata]
    assert all(item.default is not MISSING for item, _ in found)
    return tuple(found)


def spelled(name: str) -> str:
    """A field's name as the command line has it, without the dashes in front: `seq_len` -> `seq-len`."""
    return name.replace("_", "-")


def check(value: object) -> None:
    """Raise UsageError for the first option of a Job or Plan that has a value which it cannot have."""
    _check(type(value), vars(value))


def varied(value: _Value, changes: Mapping[str, Any]) -> _Value:
    """What `dataclasses.replace` makes of a Plan, or of another frozen value that is not checked as a whole.

    A search makes a hundred thousand; this takes a fifth of the time, because only the changes are checked.  Raises
    UsageError, and TypeError for a field that there is not.
    """
    if not changes.keys() <= vars(value).keys():
        unknown = sorted(changes.keys() - vars(value).keys())
        raise TypeError(f"{type(value).__name__} has no {', '.join(unknown)}")
    _check(type(value), changes)
    made = object.__new__(type(value))
    vars(made).update(vars(value), **changes)
    return made


def _check(kind: type, values: Mapping[str, Any]) -> None:
    known = _by_name(kind)
    for name, found in values.items():
        option, default = known.get(name, _NONE)
        if option is None or found is default:  # as nearly all are
            continue
        if option.kind == "word" and not (isinstance(found, str) and listed(found, option.possible)):
            raise UsageError(f"Unknown {spelled(name)} {found!r}; possible: {', '.join(option.possible)}.")
        if option.kind == "number" and (type(found) is not int or found < option.least):
            shown = repr(found) if isinstance(found, str) else found
            raise UsageError(f"{spelled(name)} is {shown}; it must be a whole number of at least {option.least}.")
        if option.kind == "amount" and not is_amount(found):
            raise UsageError(f"{spelled(name)} is {found}; it must be a number above 0.")
        if option.kind == "fraction" and not (isinstance(found, int | float) and 0 <= found < 1):
            raise UsageError(f"{spelled(name)} is {found}; it must be at least 0 and less than 1.")


_NONE: Final = None, None
"""Of a field that is no option."""


@cache
def _by_name(kind: Any) -> dict[str, tuple[Option | None, Any]]:
    """Each option with its default."""
    return {item.name: (option, item.default) for item, option in options(kind)}


def words(value: object) -> tuple[str, ...]:
    """Several words, also from a text with commas between them, or from numbers.  Raises ValueError for others."""
    if isinstance(value, str):
        return tuple(word.strip() for word in value.split(",") if word.strip())
    if not isinstance(value, tuple | list) or not all(type(one) in (str, int) for one in value):
        raise ValueError(f"{value!r} is no list of words")
    return tuple(map(str, value))


def is_amount(value: object) -> TypeGuard[float]:
    """True of a number above zero that is not infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


@lru_cache(maxsize=1024)
def listed(value: str, possible: tuple[str, ...]) -> bool:
    """True if `possible` holds the value or its pattern: `every-N` for `every-3`, `budget=SIZE` for `budget=4GiB`."""
    if value.endswith(("-N", "=SIZE", "=FRACTION", "WxH")):
        return False
    if _AREA.fullmatch(value):
        return "WxH" in possible
    name, equals, size = value.partition("=")
    if equals:
        return (f"{name}=SIZE" in possible and _is_size(size)) or (
            f"{name}=FRACTION" in possible and _is_fraction(size)
        )
    return _NUMBER.sub("-N", value) in possible


def _is_fraction(text: str) -> bool:
    return re.fullmatch(r"0?\.[0-9]+", text) is not None and float(text) > 0


def _is_size(text: str) -> bool:
    try:
        return parse_bytes(text) > 0
    except UsageError:
        return False
