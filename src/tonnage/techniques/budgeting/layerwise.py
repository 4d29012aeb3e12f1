"""The treatment of each layer of a network under a budget of bytes: a multiple-choice knapsack with a high-water
mark.

Layers run forward one after the other and backward in reverse.  At the end of forward all of them hold what they
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
"""Partial choices that are followed at once for a layer; beyond that number the least promising are dropped."""

CLOSE: Final = 1e-3
"""Fraction of the seconds of all layers that is not worth a further search."""


@dataclass(frozen=True, slots=True)
class Way:
    """One treatment of a layer."""

    kept: int
    """Bytes kept from forward to backward."""
    again: int | None
    """Most bytes held while the layer runs again; None if it does not."""
    seconds: float
    """Seconds of running again."""
    treatment: Any = None
    """The treatment in detail; not used here."""


@dataclass(frozen=True)
class Network:
    """The bytes that a forward pass keeps for backward: layer by layer, and around them."""

    layers: tuple[tuple[Way, ...], ...]
    """The options of each layer, in the order in which they run forward; equal layers have the same tuple."""
    before: int
    """Bytes kept until backward has passed the layers: embeddings' inputs, masks, positions."""
    after: int
    """Bytes kept by what runs after the layers (head and loss), freed when backward comes to the layers."""

    def peak(self, ways: Sequence[Way]) -> int:
        """Return the most bytes held at any moment: at the end of forward, or while a layer runs again."""
        held, peak = self.before, 0
        for way in ways:
            if way.again is not None:
                peak = max(peak, held + way.again)
            held += way.kept
        return max(peak, held + self.after)

    @property
    def last_way(self) -> Way:
        """Return the fastest of the options with which the last layer needs fewest bytes, at the end of forward or
        run again.

        That is mostly to keep everything: nothing after it is held any more when it would run again.
        """
        return min(self.layers[-1], key=lambda way: (self.last_needs(way), way.seconds))

    def last_needs(self, way: Way) -> int:
        """Return the bytes of the last layer and what comes after it, at their highest."""
        return max(way.again or 0, way.kept + self.after)

    @property
    def least(self) -> int:
        """Return the peak with the fewest bytes kept in every layer."""
        return self.peak([min(ways, key=lambda way: way.kept) for ways in self.layers])


Chosen: TypeAlias = tuple[Way, ...]


def choose(network: Network, budget_bytes: int) -> Chosen | None:
    """Return the treatment of each layer with the fewest seconds in all (up to CLOSE) within the budget; None if none
    fits.

    Branch and bound over the layers, first to last: of all choices for the layers so far that hold as many bytes, the
    fastest is followed, if with a lower bound for the rest it may still beat the best known.  Layers that have the
    same options are then ordered so that the last ones keep most.
    """
    best = _fill_greedily(network, budget_bytes)
    if best is None:
        return None
    optimum = _Search(network, budget_bytes).better_than(_improve_by_pairs(network, best, budget_bytes))
    return _keep_most_last(network, optimum, budget_bytes)


def _fill_greedily(network: Network, budget_bytes: int) -> Chosen | None:
    """Return a good choice: from the fewest bytes on, the best exchange of seconds for bytes is made in the last
    layers it fits.
    """
    chosen = [min(ways, key=lambda way: way.kept) for ways in network.layers]
    if network.peak(chosen) > budget_bytes:
        return None
    chosen[-1] = network.last_way
    hulls = {id(ways): hull(ways) for ways in network.layers}
    steps = [(gained(a, b), key, b) for key, points in hulls.items() for a, b in pairwise(points)]
    for _, key, way in sorted(steps, key=lambda step: -step[0]):
        chosen = _treat_last_layers(network, chosen, key, way, budget_bytes)
    for ways in {
        id(ways): ways for ways in network.layers
    }.values():  # the rest may be enough for an option that is not on the hull
        for way in sorted(ways, key=lambda way: way.seconds):
            chosen = _treat_last_layers(network, chosen, id(ways), way, budget_bytes)
    return tuple(chosen)


def _treat_last_layers(network: Network, chosen: list[Way], key: int, to: Way, budget_bytes: int) -> list[Way]:
    """Treat as many layers of a kind in this way as fit, of those that take more seconds, the last ones first."""
    slower = [
        index for index, way in enumerate(chosen) if id(network.layers[index]) == key and way.seconds > to.seconds
    ]

    def with_last(count: int) -> list[Way]:
        raised = list(chosen)
        for index in slower[len(slower) - count :]:
            raised[index] = to
        return raised

    fitting = bisect_left(range(1, len(slower) + 1), True, key=lambda n: network.peak(with_last(n)) > budget_bytes)
    return with_last(fitting)


def _improve_by_pairs(network: Network, chosen: Chosen, budget_bytes: int) -> Chosen:
    """Treat two layers at a time differently, as long as that takes fewer seconds."""
    while True:
        exchanged = _pair_exchanges(network, chosen, budget_bytes)
        possible = (_keep_most_last(network, choice, budget_bytes) for choice in exchanged)
        within = [choice for choice in possible if network.peak(choice) <= budget_bytes]
        best = min(within, key=_seconds, default=chosen)
        if _seconds(best) >= _seconds(chosen):
            return chosen
        chosen = best


def _pair_exchanges(network: Network, chosen: Chosen, budget_bytes: int) -> Iterator[Chosen]:
    """Yield for each two layers but the last, one pair for equal ones, the choice with the fastest options in
    their bytes.
    """
    room = budget_bytes - network.peak(chosen)
    alike: dict[tuple[int, Way], list[int]] = {}
    for index, way in enumerate(chosen[:-1]):
        alike.setdefault((id(network.layers[index]), way), []).append(index)
    for one, other in combinations_with_replacement(alike.values(), 2):
        first, second = one[0], other[-1]
        if first != second:
            held = chosen[first].kept + chosen[second].kept + room
            for pair in _fastest_pair(network.layers[first], network.layers[second], held):
                exchanged = list(chosen)
                exchanged[first], exchanged[second] = pair
                yield tuple(exchanged)


def _fastest_pair(ways: Sequence[Way], other_ways: Sequence[Way], room_bytes: int) -> Iterator[tuple[Way, Way]]:
    """Yield the two options with the fewest seconds that together keep at most so many bytes, if any do."""
    pairs: list[tuple[Way, Way]] = []
    optimal = _pareto_optimal(other_ways)
    for way in ways:
        number = bisect_right(optimal, room_bytes - way.kept, key=lambda beside: beside.kept)
        if number:
            pairs.append((way, optimal[number - 1]))
    if pairs:
        yield min(pairs, key=_seconds)


def _pareto_optimal(ways: Sequence[Way]) -> list[Way]:
    """Return the options that are faster than all that keep no more, from the fewest bytes on."""
    optimal: list[Way] = []
    for way in sorted(ways, key=lambda way: (way.kept, way.seconds)):
        if not optimal or way.seconds < optimal[-1].seconds:
            optimal.append(way)
    return optimal


def _seconds(ways: Sequence[Way]) -> float:
    return sum(way.seconds for way in ways)


def hull(ways: Sequence[Way]) -> list[Way]:
    """Return the lower convex hull of seconds over kept bytes, from the fewest bytes to the fewest seconds."""
    points: list[Way] = []
    for way in _pareto_optimal(ways):
        while len(points) > 1 and gained(points[-2], points[-1]) <= gained(points[-1], way):
            points.pop()
        points.append(way)
    return points


def gained(less: Way, more: Way) -> float:
    """Return the seconds that each further byte saves."""
    return (less.seconds - more.seconds) / (more.kept - less.kept)


class _Relaxation:
    """The fewest seconds that some layers can take within a number of bytes, if options could be mixed.

    The linear relaxation of a multiple-choice knapsack: steps of all hulls, the best exchange first.
    """

    def __init__(self, hulls: Sequence[tuple[Sequence[Way], int]]) -> None:
        self.bytes = sum(points[0].kept * count for points, count in hulls)
        self.seconds = sum(points[0].seconds * count for points, count in hulls)
        steps = sorted(
            ((gained(a, b), (b.kept - a.kept) * count) for points, count in hulls for a, b in pairwise(points)),
            reverse=True,
        )
        self.ends, self.saved, self.rates = [0], [0.0], []
        for rate, size in steps:
            self.rates.append(rate)
            self.ends.append(self.ends[-1] + size)
            self.saved.append(self.saved[-1] + rate * size)

    def least_seconds(self, room_bytes: int) -> float:
        """Return the fewest seconds; infinite if the bytes are not enough."""
        room = room_bytes - self.bytes
        if room < 0:
            return float("inf")
        step = bisect_right(self.ends, room) - 1
        if step == len(self.rates):
            return self.seconds - self.saved[-1]
        return self.seconds - self.saved[step] - self.rates[step] * (room - self.ends[step])


Label: TypeAlias = tuple[int, float, Any]
"""Bytes held, seconds, and the options of the layers so far as a linked list."""


@dataclass(frozen=True)
class _Search:
    """One search for the best choice."""

    network: Network
    budget_bytes: int

    @cached_property
    def relaxations(self) -> list[_Relaxation]:
        """Return the relaxation of the layers from each one on; the last layer counts with all that it needs."""
        *others, last = self.network.layers
        hulls = {id(ways): hull(ways) for ways in others}
        ending = hull([replace(way, kept=self.network.last_needs(way)) for way in last])
        counts: dict[int, int] = {}
        relaxations = [_Relaxation([(ending, 1)])]
        for ways in reversed(others):
            counts[id(ways)] = counts.get(id(ways), 0) + 1
            relaxations.append(_Relaxation([(ending, 1), *((hulls[key], count) for key, count in counts.items())]))
        return relaxations[::-1]

    def better_than(self, known: Chosen) -> Chosen:
        """Return the best choice, which may be the known one."""
        *others, last = self.network.layers
        limit = _seconds(known) - CLOSE * sum(ways[0].seconds for ways in self.network.layers)
        labels: list[Label] = [(self.network.before, 0.0, None)]
        for ways, rest in zip(others, self.relaxations[1:], strict=True):
            labels = _prune(self._extend(labels, ways), rest, self.budget_bytes, limit)
        ended = [label for label in self._extend(labels, last) if label[0] + self.network.after <= self.budget_bytes]
        best = min(ended, key=lambda label: label[1], default=None)
        return known if best is None or best[1] >= limit else tuple(_ways_of_path(best[2]))

    def _extend(self, labels: Sequence[Label], ways: Sequence[Way]) -> Iterator[Label]:
        for held, seconds, path in labels:
            for way in ways:
                if way.again is None or held + way.again <= self.budget_bytes:
                    yield held + way.kept, seconds + way.seconds, (way, path)


def _prune(labels: Iterator[Label], rest: _Relaxation, budget_bytes: int, limit: float) -> list[Label]:
    """Return the labels that no other beats in bytes and seconds, and that may still come in below the limit."""
    kept: list[Label] = []
    for label in sorted(labels, key=lambda label: label[:2]):
        if kept and label[1] >= kept[-1][1]:
            continue
        if label[1] + rest.least_seconds(budget_bytes - label[0]) < limit:
            kept.append(label)
    if len(kept) > MOST_LABELS:
        kept = sorted(kept, key=lambda label: label[1] + rest.least_seconds(budget_bytes - label[0]))[:MOST_LABELS]
    return kept


def _ways_of_path(path: Any) -> list[Way]:
    ways: list[Way] = []
    while path is not None:
        way, path = path
        ways.append(way)
    return ways[::-1]


def _keep_most_last(network: Network, chosen: Chosen, budget_bytes: int) -> Chosen:
    """Order the options so that in each kind of layers the last ones keep most, if the budget allows it."""
    places: dict[int, list[int]] = {}
    for index, ways in enumerate(network.layers):
        places.setdefault(id(ways), []).append(index)
    ordered = list(chosen)
    for indices in places.values():
        ways_of_kind = sorted((chosen[index] for index in indices), key=lambda way: (-way.seconds, way.kept))
        for index, way in zip(indices, ways_of_kind, strict=True):
            ordered[index] = way
    return tuple(ordered) if network.peak(ordered) <= budget_bytes else chosen
