"""The pattern that the tokens of three depths share, and from it the tokens of any depth.

Between two depths the deeper network has additional stretches of tokens, one for each time that the program goes
through the layers; the third depth has each of them once more again.  A network with `n` times as many additional
layers has each of them `n` times.  The block or layer of a token is named by a scheme that gives the same value at
all three depths, or one that changes by the same amount from each to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple

from tonnage.errors import CannotEstimate
from tonnage.shallow.tokens import END, IN_SERIES, YOUNGEST, Token

_MOST_STRETCHES: Final = 200
"""Most stretches that are searched for."""


class ResolvedToken(NamedTuple):
    """A token whose block or layer is named by one scheme."""

    key: tuple[Any, ...]
    way: int
    """The scheme by which a layer or block is named (`BlockRegistry`); -1 without one."""
    first: int
    """Its value at the least depth."""
    more: int
    """Increase of the value with each step in depth."""


@dataclass(frozen=True)
class Stretch:
    """Tokens that occur once for each step in depth, or once in all."""

    tokens: tuple[ResolvedToken, ...]
    repeats: bool


@dataclass(frozen=True)
class Pattern:
    """The tokens of a network of any depth."""

    stretches: tuple[Stretch, ...]

    @staticmethod
    def of(small: Sequence[Token], middle: Sequence[Token], large: Sequence[Token]) -> Pattern:
        """Return the pattern of three depths, one step apart.  Raises CannotEstimate if they differ by more than
        such stretches.
        """
        stretches: list[Stretch] = []
        begin = longer = 0
        for start, count in [*_find_stretches(*_keys_as_numbers(small, middle, large)), (len(small), 0)]:
            strings = small[begin:], middle[begin + longer :], large[begin + 2 * longer :]
            length, more = _place_stretch(*strings, start - begin, count)
            once = tuple(_resolve(*depths) for depths in islice(zip(*strings, strict=False), length))
            stretches += [Stretch(once, False), Stretch(more, True)]
            begin, longer = begin + length, longer + count
        return Pattern(tuple(stretches))


def _keys_as_numbers(*strings: Sequence[Token]) -> Iterator[list[int]]:
    """Yield each string with its keys as numbers."""
    numbers: dict[tuple[object, ...], int] = {}
    for string in strings:
        yield [numbers.setdefault(token.key, len(numbers)) for token in string]


def _find_stretches(small: list[int], middle: list[int], large: list[int]) -> list[tuple[int, int]]:
    """Return where the small string lacks a stretch, and the stretch's length.  Raises CannotEstimate if there is
    no solution.
    """
    length = len(small)

    def search(i: int, j: int, k: int, left: int) -> list[tuple[int, int]] | None:
        while i < length and j < len(middle) and k < len(large) and small[i] == middle[j] == large[k]:
            i, j, k = i + 1, j + 1, k + 1
        if i == length and j == len(middle) and k == len(large):
            return []
        room = len(middle) - j - (length - i)
        if not left:
            return None
        for count in range(1, min(room, j) + 1):
            if not _continues(small, middle, large, i, j, k, count):
                continue
            rest = search(i, j + count, k + 2 * count, left - 1)
            if rest is not None:
                return [(i, count), *rest]
        return None

    stretches = search(0, 0, 0, _MOST_STRETCHES)
    if stretches is None:
        raise CannotEstimate("The steps of networks of different depth differ by more than their layers.")
    return stretches


def _continues(small: list[int], middle: list[int], large: list[int], i: int, j: int, k: int, count: int) -> bool:
    """Return True if the middle string has `count` more tokens here that repeat those before, and the large one
    twice.
    """
    after = j + count
    if i < len(small) and (after >= len(middle) or middle[after] != small[i]):
        return False
    more = middle[j:after]
    return middle[j - count] == more[0] and middle[j - count : j] == more and large[k : k + 2 * count] == more + more


def _place_stretch(
    small: Sequence[Token], middle: Sequence[Token], large: Sequence[Token], place: int, count: int
) -> tuple[int, tuple[ResolvedToken, ...]]:
    """Return where a stretch begins, at `place` or as much earlier as lets all its copies resolve alike, and its
    tokens.

    If tokens of equal keys follow one another, such as each layer's weights and then one more weight of that size,
    the keys alone do not tell which of them the layers are.
    """
    for earlier in range(min(place, count) + 1):
        begin = place - earlier
        if earlier and small[begin].key != middle[begin + count].key:
            break
        copies = (middle[begin:][:count], large[begin:][:count], large[begin + count :][:count])
        try:
            resolved = tuple(_resolve_repeated(*depths) for depths in zip(*copies, strict=True))
        except CannotEstimate:
            continue
        if not any(token.more for token in resolved):
            return begin, resolved
    copies = (middle[place:][:count], large[place:][:count], large[place + count :][:count])
    return place, tuple(_resolve_repeated(*depths) for depths in zip(*copies, strict=True))


def _resolve(*depths: Token) -> ResolvedToken:
    """Return the token by the scheme with the same value at three depths, else by one that changes evenly."""
    if depths[0].key == END.key:
        return _resolve_end(depths)
    if not depths[0].ways:
        return ResolvedToken(depths[0].key, -1, 0, 0)
    if (same := _resolve_equal(depths)) is not None:
        return same
    steps = [(a, b - a, c - b) for a, b, c in zip(*(token.ways for token in depths), strict=True)]
    return _resolve_by_first(
        depths[0].key, [(first, more) if more == again else None for first, more, again in steps]
    )


def _resolve_repeated(middle: Token, first: Token, second: Token) -> ResolvedToken:
    """Return the token by the scheme with the same value in all copies of a stretch, else by one that changes
    evenly with depth.
    """
    if middle.key == END.key:
        return _resolve_end((middle, first, second))
    if not middle.ways:
        return ResolvedToken(middle.key, -1, 0, 0)
    if (same := _resolve_equal((middle, first, second))) is not None:
        return same
    values = zip(middle.ways, first.ways, second.ways, strict=True)
    return _resolve_by_first(
        middle.key, [(2 * one - two, two - one) if two == three else None for one, two, three in values]
    )


def _resolve_equal(tokens: Sequence[Token]) -> ResolvedToken | None:
    """Return the token by the first scheme with the same value in all three: there nearly always is one."""
    for scheme, (a, b, c) in enumerate(zip(*(token.ways for token in tokens), strict=True)):
        if a == b == c:
            return ResolvedToken(tokens[0].key, scheme, a, 0)
    return None


def _resolve_by_first(key: tuple[object, ...], ways: Sequence[tuple[int, int] | None]) -> ResolvedToken:
    """Return the token by the first scheme that has values, each the value at the least depth and what is added."""
    for way, values in enumerate(ways):
        if values is not None:
            return ResolvedToken(key, way, *values)
    raise CannotEstimate("A block of a deeper network cannot be told by those of shallower ones.")


def _resolve_end(copies: Sequence[Token]) -> ResolvedToken:
    """Return the block that all copies agree on, else the newest one that is like one of theirs.

    When ranks exchanged within the mark is not known, nor therefore which of several blocks was at the address then.
    """
    kinds = list(dict.fromkeys(copy.end for copy in copies if copy.end is not None))
    if not kinds:
        return ResolvedToken((*END.key, None), -1, 0, 0)
    if all(copy.end == kinds[0] for copy in copies):
        for way, values in enumerate(zip(*(copy.ways for copy in copies), strict=True)):
            if way not in IN_SERIES and values[0] >= 0 and len(set(values)) == 1:
                return ResolvedToken((*END.key, kinds[0]), way, values[0], 0)
    return ResolvedToken((*END.key, kinds[-1]), YOUNGEST, 0, 0)
