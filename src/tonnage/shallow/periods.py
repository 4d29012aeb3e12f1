"""What the tokens of three depths have in common, and the tokens of any depth that follow from it.

Between two depths the tokens differ by stretches that the deeper network has more, one for each time that the
program goes through the layers; the third depth has each of them twice more.  A network with `n` times as many
layers more has each of them `n` times.  Which block or layer a token means is said in the way that is the same at
all three depths, or that changes by as much from each to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple

from tonnage.errors import CannotEstimate
from tonnage.shallow.tokens import END, IN_SERIES, YOUNGEST, Token

_STRETCHES: Final = 200
"""More of them are not looked for."""


class Said(NamedTuple):
    """A token whose ways are settled."""

    key: tuple[Any, ...]
    way: int
    """The way in which a layer or block is named; -1 where none is."""
    first: int
    """Its value at the least depth."""
    more: int
    """And what each step in depth adds to it."""


@dataclass(frozen=True)
class Stretch:
    """Tokens that come once for each step in depth, or once in all."""

    tokens: tuple[Said, ...]
    repeats: bool


@dataclass(frozen=True)
class Pattern:
    """The tokens of a network of any depth."""

    stretches: tuple[Stretch, ...]

    @staticmethod
    def of(small: Sequence[Token], middle: Sequence[Token], large: Sequence[Token]) -> Pattern:
        """What three depths, one step apart, have in common.  Raises CannotEstimate where that is not all."""
        found: list[Stretch] = []
        begin = longer = 0
        for place, count in [*_inserted(*_numbered(small, middle, large)), (len(small), 0)]:
            strings = small[begin:], middle[begin + longer :], large[begin + 2 * longer :]
            length, more = _turned(*strings, place - begin, count)
            once = tuple(_settled(*each) for each in islice(zip(*strings, strict=False), length))
            found += [Stretch(once, False), Stretch(more, True)]
            begin, longer = begin + length, longer + count
        return Pattern(tuple(found))


def _numbered(*strings: Sequence[Token]) -> Iterator[list[int]]:
    """The keys as numbers."""
    numbers: dict[tuple[object, ...], int] = {}
    for string in strings:
        yield [numbers.setdefault(token.key, len(numbers)) for token in string]


def _inserted(small: list[int], middle: list[int], large: list[int]) -> list[tuple[int, int]]:
    """Where in the small string a stretch is missing, and how long it is.  Raises CannotEstimate."""
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

    found = search(0, 0, 0, _STRETCHES)
    if found is None:
        raise CannotEstimate("The steps of networks of different depth differ by more than their layers.")
    return found


def _continues(small: list[int], middle: list[int], large: list[int], i: int, j: int, k: int, count: int) -> bool:
    """Whether the middle string has `count` tokens more here, like those before them, and the large one twice."""
    after = j + count
    if i < len(small) and (after >= len(middle) or middle[after] != small[i]):
        return False
    more = middle[j:after]
    return middle[j - count] == more[0] and middle[j - count : j] == more and large[k : k + 2 * count] == more + more


def _turned(
    small: Sequence[Token], middle: Sequence[Token], large: Sequence[Token], place: int, count: int
) -> tuple[int, tuple[Said, ...]]:
    """Where a stretch is best said to begin: at `place`, or so much earlier that all its copies say the same.

    Where tokens of equal keys follow one another, as for each layer's weights and then one more weight of that size,
    the keys alone do not tell which of them the layers are.
    """
    for earlier in range(min(place, count) + 1):
        begin = place - earlier
        if earlier and small[begin].key != middle[begin + count].key:
            break
        copies = (middle[begin:][:count], large[begin:][:count], large[begin + count :][:count])
        try:
            found = tuple(_constant(*each) for each in zip(*copies, strict=True))
        except CannotEstimate:
            continue
        if not any(said.more for said in found):
            return begin, found
    copies = (middle[place:][:count], large[place:][:count], large[place + count :][:count])
    return place, tuple(_constant(*each) for each in zip(*copies, strict=True))


def _settled(*depths: Token) -> Said:
    """The way that says the same at three depths, else one that changes evenly."""
    if depths[0].key == END.key:
        return _end(depths)
    if not depths[0].ways:
        return Said(depths[0].key, -1, 0, 0)
    if (same := _same(depths)) is not None:
        return same
    steps = [(a, b - a, c - b) for a, b, c in zip(*(token.ways for token in depths), strict=True)]
    return _said(depths[0].key, [(first, more) if more == again else None for first, more, again in steps])


def _constant(middle: Token, first: Token, second: Token) -> Said:
    """The way that says the same in all copies of a stretch, else one that changes evenly with depth."""
    if middle.key == END.key:
        return _end((middle, first, second))
    if not middle.ways:
        return Said(middle.key, -1, 0, 0)
    if (same := _same((middle, first, second))) is not None:
        return same
    values = zip(middle.ways, first.ways, second.ways, strict=True)
    return _said(middle.key, [(2 * one - two, two - one) if two == three else None for one, two, three in values])


def _same(tokens: Sequence[Token]) -> Said | None:
    """The first way that says the same in all three: there nearly always is one."""
    for way, (a, b, c) in enumerate(zip(*(token.ways for token in tokens), strict=True)):
        if a == b == c:
            return Said(tokens[0].key, way, a, 0)
    return None


def _said(key: tuple[object, ...], ways: Sequence[tuple[int, int] | None]) -> Said:
    """By the first way there is; `ways` are values at the least depth and what is added."""
    for way, values in enumerate(ways):
        if values is not None:
            return Said(key, way, *values)
    raise CannotEstimate("A block of a deeper network cannot be told by those of shallower ones.")


def _end(copies: Sequence[Token]) -> Said:
    """A block that all copies agree on, else the newest that is like one of theirs.

    When under its mark ranks exchanged is not known, and so not which of several blocks was at an address then.
    """
    kinds = list(dict.fromkeys(copy.end for copy in copies if copy.end is not None))
    if not kinds:
        return Said((*END.key, None), -1, 0, 0)
    if all(copy.end == kinds[0] for copy in copies):
        for way, values in enumerate(zip(*(copy.ways for copy in copies), strict=True)):
            if way not in IN_SERIES and values[0] >= 0 and len(set(values)) == 1:
                return Said((*END.key, kinds[0]), way, values[0], 0)
    return Said((*END.key, kinds[-1]), YOUNGEST, 0, 0)
