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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from tonnage.errors import CannotEstimate
from tonnage.recorder.tonnage_recorder.layout import ACTIONS
from tonnage.trace.trace import Activity, Claim, Trace

Label: TypeAlias = tuple[str, str, int, int, int]
"""What a block is: phase and module (without a layer's number) that it was handed out in, bytes (or the name of
bytes that grow with depth, `tonnage.shallow.sizes`), stream; where that is not enough to tell blocks apart, the bytes
of the one before it, else 0."""

Place: TypeAlias = tuple[str, str]
"""Where a block is handed out: phase and module, without a layer's number.  Or EXCHANGE and which one."""

EXCHANGE: Final = "exchange"

_LAYER: Final = re.compile(r"(?<=\.)\d+(?=\.|$)")
LAYERS_FURTHER: Final = 0
"""The way in which a layer is named by how far it is from the one before; the other way is its number."""

_ALLOC, _REQUESTED, _COMPLETED, *_EMPTIED = (
    ACTIONS.index(name) for name in ("alloc", "free_requested", "free_completed", "segment_free", "segment_unmap")
)
"""Of the last two: where memory is not short, only who empties the cache makes the allocator give back segments."""


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

EMPTY: Final = Token(("empty",), ())
"""The allocator's cache is emptied."""


def without_layer(module: str) -> tuple[str, str, int]:
    """A module's name without the number of its layer; the name of its list; the number, -1 for none."""
    found = _LAYER.search(module)
    if found is None:
        return module, "", -1
    return f"{module[: found.start()]}#{module[found.end() :]}", module[: found.start()], int(found.group())


class Alike:
    """The blocks with one label."""

    __slots__ = ("alive", "born", "label", "last")

    def __init__(self, label: Label) -> None:
        self.label = label
        """What each of them is."""
        self.born: list[int] = []
        """All of them so far."""
        self.alive: list[int] = []
        """Those that are not taken back."""
        self.last: dict[str, int] = defaultdict(int)
        """Which of them was named last, by why."""


@dataclass
class Named:
    """The blocks so far, numbered in the order in which they were handed out, and how they are named."""

    _by_label: dict[Label, Alike] = field(default_factory=dict)
    _alike: list[Alike] = field(default_factory=list)
    _rank: list[int] = field(default_factory=list)
    _last: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def alike(self, label: Label) -> Alike:
        """The blocks with this label, which may have none yet."""
        found = self._by_label.get(label)
        if found is None:
            found = self._by_label[label] = Alike(label)
        return found

    def add(self, alike: Alike) -> int:
        """The number of a new block of these."""
        number = len(self._alike)
        self._alike.append(alike)
        self._rank.append(len(alike.born))
        alike.born.append(number)
        alike.alive.append(number)
        return number

    def end(self, number: int) -> None:
        """The block is taken back."""
        alive = self._alike[number].alive
        if alive[-1] == number:  # nearly always
            alive.pop()
        else:
            del alive[bisect_left(alive, number)]

    @property
    def count(self) -> int:
        """How many blocks there were."""
        return len(self._alike)

    def label(self, number: int) -> Label:
        """What a block is."""
        return self._alike[number].label

    def ways(self, why: str, number: int) -> tuple[int, ...]:
        """All ways to say which block is meant; `why` tells apart series of blocks that are named one by one."""
        alike, rank, last = self._alike[number], self._rank[number], self._last
        alive = alike.alive
        place = bisect_left(alive, number)
        there = place < len(alive) and alive[place] == number
        since, last[why] = number - last[why], number
        further, alike.last[why] = rank - alike.last[why], rank
        return (
            len(alive) - 1 - place if there else -1,
            place if there else -1,
            len(alike.born) - 1 - rank,
            further,
            rank,
            since,
        )

    def block(self, why: str, alike: Alike, way: int, value: int) -> int:
        """The block that is meant.  Raises IndexError where there is none, or one of another kind in its place."""
        if way == _SINCE:
            number = self._last[why] + value
            if number < 0 or self._alike[number] is not alike:
                raise IndexError
        else:
            of_kind = alike.alive if way in _OF_ALIVE else alike.born
            place = len(of_kind) - 1 - value if way in _FROM_LAST else value
            if way == _FURTHER:
                place += alike.last[why]
            if place < 0:
                raise IndexError
            number = of_kind[place]
        self._last[why] = number
        alike.last[why] = self._rank[number]
        return number


_NEWEST, _OLDEST, YOUNGEST, _FURTHER, _FIRST, _SINCE = range(6)
IN_SERIES: Final = (_SINCE, _FURTHER)
"""Ways that hang on the block named before."""
_OF_ALIVE: Final = (_NEWEST, _OLDEST)
_FROM_LAST: Final = (_NEWEST, YOUNGEST)


def tokens(
    trace: Trace, names: Mapping[tuple[Place, int], int] = MappingProxyType({}), *, by_neighbour: bool = False
) -> list[Token]:
    """The trace of a completed step as tokens; `names` are those of sizes that grow with depth.

    With `by_neighbour` blocks are also told apart by which was handed out before them: an adapter may be as large as
    the scales of a quantized weight.

    Raises CannotEstimate where the step ran out of memory, or where blocks are taken back later than the program
    gives them back (on several streams), which tokens do not tell.
    """
    if trace.outcome.get("kind") != "completed" or trace.peaks.get("ooms") or trace.repeated:
        raise CannotEstimate("Only a step that was completed without a shortage can be continued to more layers.")
    return _Reading(trace, names, by_neighbour).tokens()


class _Reading:
    """Goes through a trace once."""

    def __init__(self, trace: Trace, names: Mapping[tuple[Place, int], int], by_neighbour: bool) -> None:
        self.trace = trace
        self.names = names
        self.by_neighbour = by_neighbour
        self.before = 0
        """Bytes, or their name, of the block that was handed out last."""
        self.named = Named()
        self.at: dict[int, int] = {}
        """The block that begins at an address."""
        self.starts: list[int] = []
        """Addresses of blocks, ascending."""
        self.address: list[int] = []
        """Of each block."""
        self.bytes: list[int] = []
        """Of each block."""
        self.streams: dict[int, int] = {0: 0}
        self.layers: dict[str, int] = defaultdict(int)

    def tokens(self) -> list[Token]:
        found: list[Token] = []
        claims, exchanges = _by_mark(self.trace.claims), _by_mark(self.trace.activities("collective"))
        events = self._events()
        for number, mark in enumerate(self.trace.marks):
            found.append(self._mark(mark.step, mark.phase, mark.module))
            if number in claims:
                found += self._claimed(claims[number])
            first = self.named.count
            if number in events:
                self._handle(events[number], mark.phase, without_layer(mark.module)[0], found)
            for exchange in exchanges.get(number, ()):
                ranks, group, mine = exchange.grid
                called = self._called((EXCHANGE, exchange.name), exchange.bytes)
                found.append(Token((EXCHANGE, exchange.name, ranks, group, mine, exchange.block, called), ()))
                for address, size in zip((exchange.address, exchange.address2), _parts(exchange), strict=True):
                    block = self._exchanged(address, size, first)
                    found.append(END if block is None else self._end(block))
                    first = max(first, -1 if block is None else block)
        return found

    def _claimed(self, claims: Iterable[Claim]) -> Iterator[Token]:
        """What is known of blocks, in an order of its own."""
        said = {(claim.category, self._holding(claim.address)) for claim in claims}
        known = sorted((self.named.label(block), category, block) for category, block in said if block is not None)
        for _, category, claimed in known:
            yield self._named("claim", category, claimed)

    def _mark(self, step: int, phase: str, module: str) -> Token:
        name, of_list, layer = without_layer(module)
        if layer < 0:
            return Token(("mark", step, phase, name), ())
        since, self.layers[of_list] = layer - self.layers[of_list], layer
        return Token(("mark", step, phase, name), (since, layer))

    def _named(self, what: str, more: str, block: int) -> Token:
        return Token((what, more, self.named.label(block)), self.named.ways(what, block))

    def _end(self, block: int) -> Token:
        return Token(END.key, self.named.ways("end", block), self.named.label(block))

    def _events(self) -> dict[int, list[tuple[int, int, int, int]]]:
        """By mark: that a block is handed out or taken back, or the cache emptied; its address, bytes and stream.

        Raises CannotEstimate where peaks hang on blocks that are taken back later than they are given back.
        """
        columns = {name: np.array(column, dtype=np.int64) for name, column in self.trace.event_columns.items()}
        action, size, latest = columns["action"], columns["size"], np.maximum.accumulate(columns["mark"])
        if self._peaks(latest, action, size, _REQUESTED) != self._peaks(latest, action, size, _COMPLETED):
            raise CannotEstimate("Its peaks hang on blocks that are taken back later than they are given back.")
        blocks = np.flatnonzero(np.isin(action, (_ALLOC, _COMPLETED, *_EMPTIED)))
        facts = (action, columns["address"], size, columns["stream"])
        found: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
        events = zip(*(fact[blocks].tolist() for fact in facts), strict=True)
        for mark, event in zip(latest[blocks].tolist(), events, strict=True):
            found[mark].append(event)
        return found

    def _peaks(self, latest: Any, action: Any, size: Any, ends: int) -> dict[str, int]:
        """Most bytes in use in each phase, counted from their handing out to this kind of event."""
        change = np.where(action == _ALLOC, size, np.where(action == ends, -size, 0))
        level, rises = np.cumsum(change), change > 0
        names = list(dict.fromkeys(mark.phase for mark in self.trace.marks))
        phase = np.array([names.index(mark.phase) for mark in self.trace.marks])[latest]
        within = {name: level[rises & (phase == number)] for number, name in enumerate(names)}
        return {name: int(levels.max(initial=0)) for name, levels in within.items()}

    def _handle(
        self, events: Sequence[tuple[int, int, int, int]], phase: str, module: str, found: list[Token]
    ) -> None:
        """The order of blocks that are taken back one after the other means nothing: they are sorted."""
        ended: list[int] = []
        for action, address, size, stream in events:
            if action == _COMPLETED:
                ended.append(self.at[address])
                continue
            if ended:
                self._take_back(ended, found)
                ended.clear()
            if action in _EMPTIED:
                if found[-1:] != [EMPTY]:
                    found.append(EMPTY)
                continue
            called = self._called((phase, module), size)
            before = self.before if self.by_neighbour else 0
            label = (phase, module, called, self.streams.setdefault(stream, len(self.streams)), before)
            self.before = called
            self.at[address] = self.named.add(self.named.alike(label))
            self.address.append(address)
            self.bytes.append(size)
            insort(self.starts, address)
            found.append(Token(("alloc", *label), ()))
        self._take_back(ended, found)

    def _called(self, place: Place, size: int) -> int:
        """The size, or its name."""
        return self.names.get((place, size), size) if self.names else size

    def _take_back(self, blocks: list[int], found: list[Token]) -> None:
        label = self.named.label
        for block in sorted(blocks, key=lambda block: (label(block), block)) if len(blocks) > 1 else blocks:
            found.append(self._named("free", "", block))
            self.named.end(block)
            address = self.address[block]
            del self.at[address], self.starts[bisect_left(self.starts, address)]

    def _holding(self, address: int) -> int | None:
        """The block that is alive and contains an address."""
        place = bisect_right(self.starts, address) - 1
        if place < 0:
            return None
        block = self.at[self.starts[place]]
        return block if address < self.starts[place] + max(self.bytes[block], 1) else None

    def _exchanged(self, address: int, size: int, first: int) -> int | None:
        """The block that an exchange reads or writes: handed out under its mark (from `first` on), or there before.

        When under the mark is not known, but that exchanges follow one another is; of several blocks at the address
        the next one of the exchange's size is meant.
        """
        found = [block for block in range(first, len(self.address)) if self.address[block] == address]
        before = self._holding(address)
        found += [before] if before is not None and before < first else []
        of_size = [block for block in found if self.bytes[block] == size]
        return next(iter(of_size or found), None)


def _parts(exchange: Activity) -> tuple[int, int]:
    """Bytes that a rank sends and receives; the log has what one rank's part is."""
    ranks = exchange.grid[0]
    return (
        exchange.bytes * (ranks if exchange.name == "ReduceScatter" else 1),
        exchange.bytes * (ranks if exchange.name == "AllGather" else 1),
    )


def _by_mark(items: Iterable[Any]) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = defaultdict(list)
    for item in items:
        found[item.mark].append(item)
    return found
