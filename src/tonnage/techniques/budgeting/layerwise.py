"""How each layer of a network runs again, under a budget of bytes: a multiple-choice knapsack with a high-water mark.

Layers run forward one after the other and backward in reverse.  At the end of the forward all of them hold what they
kept; while a layer runs again those before it still do.  The budget is on the highest of these moments.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations_with_replacement, pairwise
from typing import Any, Final, TypeAlias

MOST_LABELS: Final = 100
"""Ways to come as far as a layer that are followed at once; beyond, those that promise least are given up."""

CLOSE: Final = 1e-3
"""Part of the seconds of all layers that is not worth a further search."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to treat a layer."""

    kept: int
    """Bytes from forward to backward."""
    again: int | None
    """Most bytes held while the layer runs again; None where it does not."""
    seconds: float
    """Of running again."""
    what: Any = None
    """What it stands for; not looked at here."""


@dataclass(frozen=True)
class Network:
    """What a forward pass keeps for backward: layer by layer, and around them."""

    layers: tuple[tuple[Way, ...], ...]
    """The ways of each layer, in the order in which they run forward; equal layers have the same tuple."""
    before: int
    """Bytes kept until the backward is through the layers: embeddings' inputs, masks, positions."""
    after: int
    """Bytes kept by what runs after the layers (head and loss), gone when backward comes to them."""

    def peak(self, ways: Sequence[Way]) -> int:
        """Most bytes held at any moment: at the end of the forward, or while a layer runs again."""
        held, peak = self.before, 0
        for way in ways:
            if way.again is not None:
                peak = max(peak, held + way.again)
            held += way.kept
        return max(peak, held + self.after)

    @property
    def last_way(self) -> Way:
        """The fastest of the ways in which the last layer needs least, be it at the end of the forward or again.

        That is mostly to keep everything: nothing behind it is held any more when it would run again.
        """
        return min(self.layers[-1], key=lambda way: (self.last_needs(way), way.seconds))

    def last_needs(self, way: Way) -> int:
        """Bytes of the last layer and what is behind it, at their highest."""
        return max(way.again or 0, way.kept + self.after)

    @property
    def least(self) -> int:
        """The peak with the fewest bytes kept in every layer."""
        return self.peak([min(ways, key=lambda way: way.kept) for ways in self.layers])


Chosen: TypeAlias = tuple[Way, ...]


def choose(network: Network, budget_bytes: int) -> Chosen | None:
    """The way for each layer with the fewest seconds in all (up to CLOSE) within the budget; None if nothing is.

    Branch and bound over the layers, first to last: of all choices for the layers so far that hold as many bytes, the
    fastest is followed, if with what the rest can reach at best it may still beat the best known.  Layers of a kind
    that have the same ways are then ordered so that the last ones keep most.
    """
    best = _filled(network, budget_bytes)
    if best is None:
        return None
    found = _Search(network, budget_bytes).better_than(_exchanged(network, best, budget_bytes))
    return _last_most(network, found, budget_bytes)


def _filled(network: Network, budget_bytes: int) -> Chosen | None:
    """A good choice: from the fewest bytes on, the best exchange of seconds for bytes in the last layers it fits."""
    chosen = [min(ways, key=lambda way: way.kept) for ways in network.layers]
    if network.peak(chosen) > budget_bytes:
        return None
    chosen[-1] = network.last_way
    hulls = {id(ways): hull(ways) for ways in network.layers}
    steps = [(gained(a, b), key, b) for key, found in hulls.items() for a, b in pairwise(found)]
    for _, key, way in sorted(steps, key=lambda step: -step[0]):
        chosen = _raised(network, chosen, key, way, budget_bytes)
    for ways in {id(ways): ways for ways in network.layers}.values():  # what is left may do for one off the hull
        for way in sorted(ways, key=lambda way: way.seconds):
            chosen = _raised(network, chosen, id(ways), way, budget_bytes)
    return tuple(chosen)


def _raised(network: Network, chosen: list[Way], key: int, to: Way, budget_bytes: int) -> list[Way]:
    """As many layers of a kind that take more seconds as fit treated in this way, the last ones first."""
    slower = [
        index for index, way in enumerate(chosen) if id(network.layers[index]) == key and way.seconds > to.seconds
    ]

    def with_last(count: int) -> list[Way]:
        raised = list(chosen)
        for index in slower[len(slower) - count :]:
            raised[index] = to
        return raised

    over = bisect_left(range(1, len(slower) + 1), True, key=lambda n: network.peak(with_last(n)) > budget_bytes)
    return with_last(over)


def _exchanged(network: Network, chosen: Chosen, budget_bytes: int) -> Chosen:
    """The same with two layers at a time treated otherwise, as long as that takes fewer seconds."""
    while True:
        possible = (_last_most(network, one, budget_bytes) for one in _pairs_exchanged(network, chosen, budget_bytes))
        within = [one for one in possible if network.peak(one) <= budget_bytes]
        best = min(within, key=_seconds, default=chosen)
        if _seconds(best) >= _seconds(chosen):
            return chosen
        chosen = best


def _pairs_exchanged(network: Network, chosen: Chosen, budget_bytes: int) -> Iterator[Chosen]:
    """For each two layers but the last, of equal ones for one of them, the fastest ways in the bytes of both."""
    room = budget_bytes - network.peak(chosen)
    alike: dict[tuple[int, Way], list[int]] = {}
    for index, way in enumerate(chosen[:-1]):
        alike.setdefault((id(network.layers[index]), way), []).append(index)
    for one, other in combinations_with_replacement(alike.values(), 2):
        first, second = one[0], other[-1]
        if first != second:
            held = chosen[first].kept + chosen[second].kept + room
            for pair in _fastest(network.layers[first], network.layers[second], held):
                exchanged = list(chosen)
                exchanged[first], exchanged[second] = pair
                yield tuple(exchanged)


def _fastest(one: Sequence[Way], other: Sequence[Way], room_bytes: int) -> Iterator[tuple[Way, Way]]:
    """The two ways with the fewest seconds that keep so many bytes together, if any do."""
    pairs: list[tuple[Way, Way]] = []
    unbeaten = _falling(other)
    for way in one:
        place = bisect_right(unbeaten, room_bytes - way.kept, key=lambda beside: beside.kept)
        if place:
            pairs.append((way, unbeaten[place - 1]))
    if pairs:
        yield min(pairs, key=_seconds)


def _falling(ways: Sequence[Way]) -> list[Way]:
    """Those that are faster than all that keep no more, from the fewest bytes on."""
    found: list[Way] = []
    for way in sorted(ways, key=lambda way: (way.kept, way.seconds)):
        if not found or way.seconds < found[-1].seconds:
            found.append(way)
    return found


def _seconds(ways: Sequence[Way]) -> float:
    return sum(way.seconds for way in ways)


def hull(ways: Sequence[Way]) -> list[Way]:
    """The lower convex hull of seconds over kept bytes, from the fewest bytes to the fewest seconds."""
    found: list[Way] = []
    for way in _falling(ways):
        while len(found) > 1 and gained(found[-2], found[-1]) <= gained(found[-1], way):
            found.pop()
        found.append(way)
    return found


def gained(less: Way, more: Way) -> float:
    """Seconds that each further byte saves."""
    return (less.seconds - more.seconds) / (more.kept - less.kept)


class _Rest:
    """The least seconds that some layers can take within a number of bytes, if ways could be mixed.

    The linear relaxation of a multiple-choice knapsack: steps of all hulls, the best exchange first.
    """

    def __init__(self, hulls: Sequence[tuple[Sequence[Way], int]]) -> None:
        self.bytes = sum(found[0].kept * count for found, count in hulls)
        self.seconds = sum(found[0].seconds * count for found, count in hulls)
        steps = sorted(
            ((gained(a, b), (b.kept - a.kept) * count) for found, count in hulls for a, b in pairwise(found)),
            reverse=True,
        )
        self.ends, self.saved, self.rates = [0], [0.0], []
        for rate, size in steps:
            self.rates.append(rate)
            self.ends.append(self.ends[-1] + size)
            self.saved.append(self.saved[-1] + rate * size)

    def least_seconds(self, room_bytes: int) -> float:
        """Infinite where the bytes do not do."""
        room = room_bytes - self.bytes
        if room < 0:
            return float("inf")
        place = bisect_right(self.ends, room) - 1
        if place == len(self.rates):
            return self.seconds - self.saved[-1]
        return self.seconds - self.saved[place] - self.rates[place] * (room - self.ends[place])


Label: TypeAlias = tuple[int, float, Any]
"""Bytes held, seconds, and the ways of the layers so far as a linked list."""


@dataclass(frozen=True)
class _Search:
    """One search for the best choice."""

    network: Network
    budget_bytes: int

    @cached_property
    def rests(self) -> list[_Rest]:
        """For each layer what those from it on can reach; of the last one all that it needs counts."""
        *others, last = self.network.layers
        hulls = {id(ways): hull(ways) for ways in others}
        ending = hull([replace(way, kept=self.network.last_needs(way)) for way in last])
        counts: dict[int, int] = {}
        found = [_Rest([(ending, 1)])]
        for ways in reversed(others):
            counts[id(ways)] = counts.get(id(ways), 0) + 1
            found.append(_Rest([(ending, 1), *((hulls[key], count) for key, count in counts.items())]))
        return found[::-1]

    def better_than(self, known: Chosen) -> Chosen:
        """The best choice, which may be the one that is known."""
        *others, last = self.network.layers
        limit = _seconds(known) - CLOSE * sum(ways[0].seconds for ways in self.network.layers)
        labels: list[Label] = [(self.network.before, 0.0, None)]
        for ways, rest in zip(others, self.rests[1:], strict=True):
            labels = _unbeaten(self._extended(labels, ways), rest, self.budget_bytes, limit)
        ended = [
            label for label in self._extended(labels, last) if label[0] + self.network.after <= self.budget_bytes
        ]
        best = min(ended, key=lambda label: label[1], default=None)
        return known if best is None or best[1] >= limit else tuple(_walked(best[2]))

    def _extended(self, labels: Sequence[Label], ways: Sequence[Way]) -> Iterator[Label]:
        for held, seconds, path in labels:
            for way in ways:
                if way.again is None or held + way.again <= self.budget_bytes:
                    yield held + way.kept, seconds + way.seconds, (way, path)


def _unbeaten(labels: Iterator[Label], rest: _Rest, budget_bytes: int, limit: float) -> list[Label]:
    """Those that no other beats in bytes and seconds, and that may still come in below the limit."""
    found: list[Label] = []
    for label in sorted(labels, key=lambda label: label[:2]):
        if found and label[1] >= found[-1][1]:
            continue
        if label[1] + rest.least_seconds(budget_bytes - label[0]) < limit:
            found.append(label)
    if len(found) > MOST_LABELS:
        found = sorted(found, key=lambda label: label[1] + rest.least_seconds(budget_bytes - label[0]))[:MOST_LABELS]
    return found


def _walked(path: Any) -> list[Way]:
    found: list[Way] = []
    while path is not None:
        way, path = path
        found.append(way)
    return found[::-1]


def _last_most(network: Network, chosen: Chosen, budget_bytes: int) -> Chosen:
    """The same ways, in each kind of layers those that keep most last, as far as the budget allows the order."""
    places: dict[int, list[int]] = {}
    for index, ways in enumerate(network.layers):
        places.setdefault(id(ways), []).append(index)
    ordered = list(chosen)
    for indices in places.values():
        ways_of_kind = sorted((chosen[index] for index in indices), key=lambda way: (-way.seconds, way.kept))
        for index, way in zip(indices, ways_of_kind, strict=True):
            ordered[index] = way
    return tuple(ordered) if network.peak(ordered) <= budget_bytes else chosen
