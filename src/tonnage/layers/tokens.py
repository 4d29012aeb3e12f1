"""A trace as a string of tokens that says the same of every layer: nothing in it counts layers, bytes or blocks.

A token is a change of phase or module, a block handed out or taken back, or what is known of a block.  Blocks are
named by what they are (where in the program they were handed out, and their size) and by which of those is meant,
said in several ways: the newest, the oldest, the next one after the last that was named.  Of equal layers the tokens
are then equal, so a network of three layers and one of four differ by one stretch of tokens for each time that the
program goes through the layers.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from tonnage.errors import CannotEstimate
from tonnage.trace import ACTIONS, Activity, Trace

Label: TypeAlias = tuple[str, str, int, int]
"""What a block is: phase and module (without a layer's number) that it was handed out in, bytes, stream."""

_LAYER: Final = re.compile(r"(?<=\.)\d+(?=\.|$)")
LAYERS_FURTHER: Final = 0
"""The way in which a layer is named by how far it is from the one before; the other way is its number."""

_ALLOC, _REQUESTED, _COMPLETED = (ACTIONS.index(name) for name in ("alloc", "free_requested", "free_completed"))


class Token(NamedTuple):
    """One thing that happens."""

    key: tuple[object, ...]
    """What it is."""
    ways: tuple[int, ...]
    """Which layer or block is meant, said in several ways (`Named`); none where there is only one."""
    end: Label | None = None
    """Of an exchange's ends the block that seems to be meant, which is not certain and so not in `key`."""


END: Final = Token(("end",), ())
"""An end of an exchange of which no block is known."""


def without_layer(module: str) -> tuple[str, str, int]:
    """A module's name without the number of its layer; the name of its list; the number, -1 for none."""
    found = _LAYER.search(module)
    if found is None:
        return module, "", -1
    return f"{module[: found.start()]}#{module[found.end() :]}", module[: found.start()], int(found.group())


@dataclass
class Named:
    """The blocks so far, numbered in the order in which they were handed out, and how they are named."""

    labels: list[Label] = field(default_factory=list)
    """What each block is."""
    _born: dict[Label, list[int]] = field(default_factory=lambda: defaultdict(list))
    _alive: dict[Label, list[int]] = field(default_factory=lambda: defaultdict(list))
    _rank: list[int] = field(default_factory=list)
    _last: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _last_of: dict[tuple[str, Label], int] = field(default_factory=lambda: defaultdict(int))

    def add(self, label: Label) -> int:
        """The number of a new block."""
        number = len(self.labels)
        self.labels.append(label)
        born = self._born[label]
        self._rank.append(len(born))
        born.append(number)
        self._alive[label].append(number)
        return number

    def end(self, number: int) -> None:
        """The block is taken back."""
        alive = self._alive[self.labels[number]]
        del alive[bisect_left(alive, number)]

    def count(self, label: Label) -> int:
        """How many blocks are like this."""
        return len(self._born[label])

    def ways(self, why: str, number: int) -> tuple[int, ...]:
        """All ways to say which block is meant; `why` tells apart series of blocks that are named one by one."""
        label = self.labels[number]
        alive, rank = self._alive[label], self._rank[number]
        place = bisect_left(alive, number)
        there = place < len(alive) and alive[place] == number
        since, self._last[why] = number - self._last[why], number
        further, self._last_of[why, label] = rank - self._last_of[why, label], rank
        return (
            len(alive) - 1 - place if there else -1,
            place if there else -1,
            len(self._born[label]) - 1 - rank,
            since,
            rank,
            further,
        )

    def block(self, why: str, label: Label, way: int, value: int) -> int:
        """The block that is meant.  Raises IndexError where there is none."""
        if way == _SINCE:
            number = self._last[why] + value
        else:
            of_label = self._alive[label] if way in (_NEWEST, _OLDEST) else self._born[label]
            place = {_NEWEST: len(of_label) - 1 - value, YOUNGEST: len(of_label) - 1 - value}.get(way, value)
            if way == _FURTHER:
                place += self._last_of[why, label]
            number = of_label[place] if place >= 0 else -1
        if not 0 <= number < len(self.labels):
            raise IndexError
        self._last[why] = number
        self._last_of[why, label] = self._rank[number]
        return number


_NEWEST, _OLDEST, YOUNGEST, _SINCE, _FIRST, _FURTHER = range(6)
IN_SERIES: Final = (_SINCE, _FURTHER)
"""Ways that hang on the block named before."""


def tokens(trace: Trace) -> list[Token]:
    """The trace of a completed step as tokens.

    Raises CannotEstimate where the step ran out of memory, or where blocks are taken back later than the program
    gives them back (on several streams), which tokens do not tell.
    """
    if trace.outcome.get("kind") != "completed" or trace.peaks.get("ooms") or trace.repeated:
        raise CannotEstimate("Only a step that was completed without a shortage can be continued to more layers.")
    return list(_Reading(trace).tokens())


class _Reading:
    """Goes through a trace once."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.named = Named()
        self.at: dict[int, int] = {}
        """The block that begins at an address."""
        self.starts: list[int] = []
        """Addresses of blocks, ascending."""
        self.address: list[int] = []
        """Of each block."""
        self.streams: dict[int, int] = {0: 0}
        self.layers: dict[str, int] = defaultdict(int)

    def tokens(self) -> Iterator[Token]:
        claims, exchanges = _by_mark(self.trace.claims), _by_mark(self.trace.activities("collective"))
        events = self._events()
        for number, mark in enumerate(self.trace.marks):
            yield self._mark(mark.step, mark.phase, mark.module)
            said = {(claim.category, self._holding(claim.address)) for claim in claims.get(number, ())}
            known = sorted(
                (self.named.labels[block], category, block) for category, block in said if block is not None
            )
            for _, category, claimed in known:
                yield self._named("claim", category, claimed)
            first = len(self.named.labels)
            yield from self._handled(events.get(number, ()), mark.phase, without_layer(mark.module)[0])
            for exchange in exchanges.get(number, ()):
                ranks, group, mine = exchange.grid
                yield Token(("exchange", exchange.name, ranks, group, mine, exchange.block, exchange.bytes), ())
                for address, size in zip((exchange.address, exchange.address2), _parts(exchange), strict=True):
                    block = self._exchanged(address, size, first)
                    yield END if block is None else self._end(block)
                    first = max(first, -1 if block is None else block)

    def _mark(self, step: int, phase: str, module: str) -> Token:
        name, of_list, layer = without_layer(module)
        if layer < 0:
            return Token(("mark", step, phase, name), ())
        since, self.layers[of_list] = layer - self.layers[of_list], layer
        return Token(("mark", step, phase, name), (since, layer))

    def _named(self, what: str, more: str, block: int) -> Token:
        return Token((what, more, self.named.labels[block]), self.named.ways(what, block))

    def _end(self, block: int) -> Token:
        return Token(END.key, self.named.ways("end", block), self.named.labels[block])

    def _events(self) -> dict[int, list[tuple[bool, int, int, int]]]:
        """By mark: whether a block is handed out or taken back, its address, bytes and stream.

        Raises CannotEstimate where peaks hang on blocks that are taken back later than they are given back.
        """
        found: dict[int, list[tuple[bool, int, int, int]]] = defaultdict(list)
        given, taken = _Level(), _Level()
        columns = self.trace.event_columns
        latest = 0
        for action, address, size, stream, mark in zip(
            *(columns[name] for name in ("action", "address", "size", "stream", "mark")), strict=True
        ):
            latest = max(latest, mark)
            if action in (_ALLOC, _COMPLETED):
                found[latest].append((action == _ALLOC, address, size, stream))
            phase = self.trace.marks[latest].phase
            given.change(phase, {_ALLOC: size, _REQUESTED: -size}.get(action, 0))
            taken.change(phase, {_ALLOC: size, _COMPLETED: -size}.get(action, 0))
        if given.highest != taken.highest:
            raise CannotEstimate("Its peaks hang on blocks that are taken back later than they are given back.")
        return found

    def _handled(self, events: Sequence[tuple[bool, int, int, int]], phase: str, module: str) -> Iterator[Token]:
        """The order of blocks that are taken back one after the other means nothing: they are sorted."""
        ended: list[int] = []
        for handed_out, address, size, stream in events:
            if not handed_out:
                ended.append(self.at[address])
                continue
            yield from self._ended(ended)
            ended.clear()
            label = (phase, module, size, self.streams.setdefault(stream, len(self.streams)))
            self.at[address] = self.named.add(label)
            self.address.append(address)
            insort(self.starts, address)
            yield Token(("alloc", *label), ())
        yield from self._ended(ended)

    def _ended(self, blocks: Iterable[int]) -> Iterator[Token]:
        for block in sorted(blocks, key=lambda block: (self.named.labels[block], block)):
            yield self._named("free", "", block)
            self.named.end(block)
            address = self.address[block]
            del self.at[address], self.starts[bisect_left(self.starts, address)]

    def _holding(self, address: int) -> int | None:
        """The block that is alive and contains an address."""
        place = bisect_right(self.starts, address) - 1
        if place < 0:
            return None
        block = self.at[self.starts[place]]
        return block if address < self.starts[place] + max(self.named.labels[block][2], 1) else None

    def _exchanged(self, address: int, size: int, first: int) -> int | None:
        """The block that an exchange reads or writes: handed out under its mark (from `first` on), or there before.

        When under the mark is not known, but that exchanges follow one another is; of several blocks at the address
        the next one of the exchange's size is meant.
        """
        found = [block for block in range(first, len(self.address)) if self.address[block] == address]
        before = self._holding(address)
        found += [before] if before is not None and before < first else []
        of_size = [block for block in found if self.named.labels[block][2] == size]
        return next(iter(of_size or found), None)


def _parts(exchange: Activity) -> tuple[int, int]:
    """Bytes that a rank sends and receives; the log has what one rank's part is."""
    ranks = exchange.grid[0]
    return (
        exchange.bytes * (ranks if exchange.name == "ReduceScatter" else 1),
        exchange.bytes * (ranks if exchange.name == "AllGather" else 1),
    )


@dataclass
class _Level:
    """Bytes in use, and the most of each phase."""

    now: int = 0
    highest: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def change(self, phase: str, more: int) -> None:
        self.now += more
        if more > 0 and self.now > self.highest[phase]:
            self.highest[phase] = self.now


def _by_mark(items: Iterable[Any]) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = defaultdict(list)
    for item in items:
        found[item.mark].append(item)
    return found
