"""What a network of any depth asks of the allocator, and its trace when the allocator was asked.

A ghost hears of marks and of blocks alone (`columns`); what is known of the blocks, and which of them ranks exchange,
is put beside the events that its allocator then writes.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from tonnage.recorder.tonnage_recorder.layout import ACTIONS
from tonnage.shallow.periods import Pattern, Said
from tonnage.shallow.sizes import Sizes
from tonnage.shallow.tokens import LAYERS_FURTHER, Alike, Named
from tonnage.trace.communicators import Communicators
from tonnage.trace.trace import Activity, Claim, Mark, Trace, marks_to_json, packed

MARK, ALLOC, FREE, CONNECT, EMPTY = range(5)
"""Kinds of requests: a mark begins (its number); a block is handed out (bytes, stream) or taken back (its number);
ranks exchange for the first time (as many as a new communicator has or 0, new peers); the cache is emptied."""

_ALLOC: Final = ACTIONS.index("alloc")


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A collective that a rank takes part in."""

    mark: int
    name: str
    layout: tuple[int, int, int]
    """Ranks, number of the group, this rank in it."""
    peer: int
    bytes: int
    ends: tuple[int, int]
    """The blocks that are read and written; -1 for none."""


@dataclass(frozen=True, kw_only=True)
class Requests:
    """All that happens, in order, with blocks numbered as they are handed out."""

    marks: tuple[Mark, ...]
    """Changes of phase and module."""
    columns: array[int]
    """Triples: kind of request and its two numbers."""
    claims: tuple[tuple[int, int, str], ...]
    """Mark, block and category of what is known of blocks."""
    exchanges: tuple[Exchange, ...]
    """Of ranks."""
    growing: frozenset[str]
    """Phases with a block whose size grows with depth: where memory is short a program may ask for less of those."""

    @staticmethod
    def of(pattern: Pattern, steps: int, sizes: Sizes) -> Requests:
        """Those of a network so many steps in depth beyond the least.  Raises IndexError where a block is missing."""
        return _Writing(sizes, steps).written(pattern)

    def write(self, path: Path) -> None:
        """Write down what a ghost is to be asked: a line of JSON with the marks, then the requests."""
        path.write_bytes(json.dumps(marks_to_json(self.marks)).encode() + b"\n" + self.columns.tobytes())

    def traced(self, run: Trace) -> Trace:
        """What a ghost wrote when it was asked, with what is known of its blocks."""
        events = run.event_columns
        action, address = (np.frombuffer(events[name], dtype=np.int64) for name in ("action", "address"))
        born = address[action == _ALLOC].tolist()
        claims = (Claim(mark, born[block], category) for mark, block, category in self.claims if block < len(born))
        names = tuple(dict.fromkeys(each.name for each in self.exchanges))
        places = {name: place for place, name in enumerate(names)}
        return replace(run, claims=tuple(claims), names=names, log=b"".join(self._log(places, born, _whole(run))))

    def _log(self, places: Mapping[str, int], born: list[int], marks: int) -> Iterator[bytes]:
        for each in self.exchanges:
            if each.mark >= marks or max(each.ends) >= len(born):  # the memory ran out before
                return
            sent, received = (born[end] if end >= 0 else 0 for end in each.ends)
            layout, peer = each.layout, each.peer
            yield packed(
                Activity("collective", each.name, each.mark, 0, layout, peer, 0, each.bytes, sent, received), places
            )


def _whole(run: Trace) -> int:
    """How many marks a run came through: not the one in which memory ran out, whose exchanges are asked for last.

    At its end the watch sets one more.
    """
    return len(run.marks) - (2 if run.outcome["kind"] == "oom" else 1)


class _Writing:
    """Turns tokens into requests, one after the other."""

    def __init__(self, sizes: Sizes, steps: int) -> None:
        self.sizes, self.steps = sizes, steps
        self.named = Named()
        self.marks: list[Mark] = []
        self.columns: list[int] = []
        self.claims: list[tuple[int, int, str]] = []
        self.exchanges: list[tuple[int, str, tuple[int, int, int], int, int]] = []
        self.communicators = Communicators()
        self.ends: list[int] = []
        """Blocks, two for each exchange."""
        self.layers: dict[str, int] = {}

    def written(self, pattern: Pattern) -> Requests:
        """All of them."""
        for stretch in pattern.stretches:
            each = [self._writer(said) for said in stretch.tokens]
            for _ in range(self.steps if stretch.repeats else 1):
                for write in each:
                    write()
        self._leave_out_the_end()
        return Requests(
            marks=tuple(self.marks),
            columns=array("q", self.columns),
            claims=tuple(self.claims),
            exchanges=tuple(self._exchanges()),
            growing=self.sizes.phases,
        )

    def _exchanges(self) -> Iterator[Exchange]:
        ends = zip(self.ends[::2], self.ends[1::2], strict=True)
        for (mark, name, layout, peer, size), of_it in zip(self.exchanges, ends, strict=True):
            yield Exchange(mark=mark, name=name, layout=layout, peer=peer, bytes=size, ends=of_it)

    def _leave_out_the_end(self) -> None:
        """The last mark, which whoever watches a run sets at its end."""
        self.marks.pop()
        del self.columns[-3:]
        self.claims = [claim for claim in self.claims if claim[0] < len(self.marks)]

    def _writer(self, said: Said) -> Callable[[], None]:
        """What writes a token: a call with all that is the same each time that it comes."""
        kind, *facts = said.key
        meant = () if said.way < 0 else (said.way, said.first + said.more * self.steps)
        match kind:
            case "mark":
                return partial(self._mark, *facts, *meant)
            case "alloc":
                _, _, size, stream, _ = facts
                return partial(
                    self._alloc, self.named.alike(tuple(facts)), self.sizes.bytes(size, self.steps), stream
                )
            case "free":
                return partial(self._free, self.named.alike(facts[1]), *meant)
            case "claim":
                return partial(self._claim, facts[0], self.named.alike(facts[1]), *meant)
            case "exchange":
                name, ranks, group, mine, peer, size = facts
                layout = (ranks, group, mine)
                return partial(self._exchange, name, layout, peer, self.sizes.bytes(size, self.steps))
            case "end":
                return partial(self._end, self.named.alike(facts[0]) if facts[0] is not None else None, *meant)
        return partial(self._ask, EMPTY, 0, 0)

    def _mark(self, step: int, phase: str, module: str, way: int = -1, value: int = 0) -> None:
        if way >= 0:
            of_list, _, rest = module.partition("#")
            layer = value + (self.layers.get(of_list, 0) if way == LAYERS_FURTHER else 0)
            self.layers[of_list] = layer
            module = f"{of_list}{layer}{rest}"
        self._ask(MARK, len(self.marks), 0)
        self.marks.append(Mark(step, phase, module))

    def _alloc(self, alike: Alike, size: int, stream: int) -> None:
        self.named.add(alike)
        self._ask(ALLOC, size, stream)

    def _free(self, alike: Alike, way: int, value: int) -> None:
        block = self.named.block("free", alike, way, value)
        self.named.end(block)
        self._ask(FREE, block, 0)

    def _claim(self, category: str, alike: Alike, way: int, value: int) -> None:
        self.claims.append((len(self.marks) - 1, self.named.block("claim", alike, way, value), category))

    def _exchange(self, name: str, layout: tuple[int, int, int], peer: int, size: int) -> None:
        self.exchanges.append((len(self.marks) - 1, name, layout, peer, size))
        first = self.communicators.use(layout, name, peer)
        if any(first):
            self._ask(CONNECT, *first)

    def _end(self, alike: Alike | None, way: int = -1, value: int = 0) -> None:
        """The two ends of an exchange follow it."""
        there = alike is not None and alike.born
        self.ends.append(self.named.block("end", alike, way, value) if alike is not None and there else -1)

    def _ask(self, kind: int, first: int, second: int) -> None:
        self.columns.extend((kind, first, second))
