"""A computed number on the host, as `loss.item()` returns it: it tells when the program decides by it.

    if loss.item() < best:        ->        train.py:12: 1.5 < inf is true, from a computed number ...

It is a float in every other respect.  Its sums, products and quotients with other numbers are computed numbers too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_COMPARISONS = {"__lt__": "<", "__le__": "<=", "__gt__": ">", "__ge__": ">=", "__eq__": "==", "__ne__": "!="}
_ARITHMETIC = (
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__"),
    *("__floordiv__", "__rfloordiv__", "__mod__", "__rmod__", "__pow__", "__rpow__", "__neg__", "__pos__", "__abs__"),
)


def make_type(note_branch: Callable[[str], None]) -> type[float]:
    """Return the type of computed numbers; `note_branch` is called with each comparison of one and its result."""

    def is_true(number: float) -> bool:
        result = float.__bool__(number)
        note_branch(f"{float(number):.4g} is {'not zero' if result else 'zero'}")
        return result

    def reduce(number: float) -> Any:
        return float, (float(number),)

    members: dict[str, Any] = {"__bool__": is_true, "__reduce__": reduce, "__hash__": float.__hash__}
    for name, sign in _COMPARISONS.items():
        members[name] = _comparison(getattr(float, name), sign, note_branch)
    kind = type("float", (float,), members)
    for name in _ARITHMETIC:
        setattr(kind, name, _arithmetic(getattr(float, name), kind))
    return kind


def _comparison(original: Callable[..., Any], sign: str, note_branch: Callable[[str], None]) -> Callable[..., Any]:
    def compare(number: float, other: Any) -> Any:
        result = original(number, other)
        if result is not NotImplemented:
            note_branch(f"{float(number):.4g} {sign} {float(other):.4g} is {'true' if result else 'false'}")
        return result

    return compare


def _arithmetic(original: Callable[..., Any], kind: type[float]) -> Callable[..., Any]:
    def compute(number: float, *others: Any) -> Any:
        result = original(number, *others)
        return kind(result) if type(result) is float else result

    return compute
