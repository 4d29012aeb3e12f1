"""The largest number of which something still has room: the edge of what fits, in few tries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

Room = Callable[[int], float | None]
"""How much is left at a number, negative where as much is missing; None where it cannot be, by an unknown lot."""

FURTHEST: Final = 16
"""How many times the largest number that has room may be, at most, what is tried beyond it."""


@dataclass(frozen=True)
class _Tried:
    number: int
    room: float | None

    @property
    def does(self) -> bool:
        return has_room(self.room)


def has_room(room: float | None) -> bool:
    """Whether something is left, or at least nothing missing."""
    return room is not None and room >= 0


def edge(most: int, room: Room) -> int | None:
    """The largest number from 1 to `most` that has room, if all smaller ones have; None where 1 has none.

    Memory is nearly linear in most of what it is asked for, so each try is made where a line through two others ends;
    after one that does not halve what is open, the middle is tried.  What is found has been tried, and so has its
    successor, which has no room.
    """
    low = _Tried(1, room(1)) if most >= 1 else None
    if low is None or not low.does:
        return None
    below: _Tried | None = None
    high: _Tried | None = None
    halve = False
    while low.number < (most if high is None else high.number - 1):
        number = min(_beyond(below, low), most) if high is None else _between(low, high, halve=halve)
        tried = _Tried(number, room(number))
        before = _open(low, high)
        if tried.does:
            below, low = low, tried
        else:
            high = tried
        after = _open(low, high)
        halve = before is not None and after is not None and 2 * after > before
    return low.number


def _open(low: _Tried, high: _Tried | None) -> int | None:
    """How many numbers may be the edge; None where it is not known how far it is."""
    return None if high is None else high.number - low.number


def _beyond(below: _Tried | None, low: _Tried) -> int:
    """Where the line through two numbers that have room ends; twice the first where there is one alone."""
    if below is None or below.room is None or low.room is None:
        return 2 * low.number
    each = (below.room - low.room) / (low.number - below.number)
    further = FURTHEST * low.number
    return further if each <= 0 else min(max(low.number + int(low.room / each), low.number + 1), further)


def _between(low: _Tried, high: _Tried, *, halve: bool) -> int:
    """Where the line from a number that has room to one that has none ends; the middle where one is not known."""
    inside = high.number - low.number
    if halve or low.room is None or high.room is None:
        return low.number + inside // 2
    part = low.room / (low.room - high.room)
    return low.number + min(max(int(part * inside), 1), inside - 1)
