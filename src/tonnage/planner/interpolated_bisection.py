"""Find the largest number that fits in few tries, by bisection with linear interpolation.

`find_largest(100, lambda number: 1 - number / 42)` is 42.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

Room = Callable[[int], float | None]
"""Returns how much is left at a number, negative for how much is missing; None if it does not fit by an unknown
amount."""

FURTHEST: Final = 16
"""The next try beyond the largest number that fits is at most this many times as large."""


@dataclass(frozen=True)
class _Try:
    number: int
    room: float | None

    @property
    def fits(self) -> bool:
        return has_room(self.room)


def has_room(room: float | None) -> bool:
    """Return whether something is left, or at least nothing missing."""
    return room is not None and room >= 0


def find_largest(most: int, room: Room) -> int | None:
    """Return the largest number from 1 to `most` that fits, if all smaller ones do; None if 1 does not.

    Memory is nearly linear in most quantities, so each try is where a line through two earlier ones reaches zero.
    After a try that does not halve the interval, the next one is its middle.  The number returned was tried, and so
    was its successor, which does not fit.
    """
    low = _Try(1, room(1)) if most >= 1 else None
    if low is None or not low.fits:
        return None
    below: _Try | None = None
    high: _Try | None = None
    halve = False
    while low.number < (most if high is None else high.number - 1):
        number = min(_extrapolate(below, low), most) if high is None else _interpolate(low, high, halve=halve)
        attempt = _Try(number, room(number))
        before = _interval(low, high)
        if attempt.fits:
            below, low = low, attempt
        else:
            high = attempt
        after = _interval(low, high)
        halve = before is not None and after is not None and 2 * after > before
    return low.number


def _interval(low: _Try, high: _Try | None) -> int | None:
    """Return how many numbers are still possible; None without an upper end."""
    return None if high is None else high.number - low.number


def _extrapolate(below: _Try | None, low: _Try) -> int:
    """Return where the line through two numbers that fit reaches zero; twice the number if there is only one."""
    if below is None or below.room is None or low.room is None:
        return 2 * low.number
    slope = (below.room - low.room) / (low.number - below.number)
    furthest = FURTHEST * low.number
    return furthest if slope <= 0 else min(max(low.number + int(low.room / slope), low.number + 1), furthest)


def _interpolate(low: _Try, high: _Try, *, halve: bool) -> int:
    """Return where the line between a number that fits and one that does not reaches zero; the middle if unknown."""
    inside = high.number - low.number
    if halve or low.room is None or high.room is None:
        return low.number + inside // 2
    part = low.room / (low.room - high.room)
    return low.number + min(max(int(part * inside), 1), inside - 1)
