"""The requests of a network of any depth to the allocator, and its trace after a ghost's allocator handled them.

A ghost gets only marks and blocks (`columns`); what is known of the blocks, and which of them ranks exchange, is
added to the events that its allocator then writes.
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

from tonnage.recorder.tonnage_recorder.record_layout import ACTIONS
from tonnage.shallow.periods import Pattern, ResolvedToken
from tonnage.shallow.sizes import Sizes
from tonnage.shallow.tokens import LAYERS_FURTHER, BlockGroup, BlockRegistry
from tonnage.trace.communicators import Communicators
from tonnage.trace.trace import Activity, Claim, Mark, Trace, marks_to_json, pack_activity

MARK, ALLOC, FREE, CONNECT, EMPTY = range(5)
"""Kinds of requests: a mark begins (its number); a block is allocated (bytes, stream) or freed (its number); ranks
exchange for the first time (ranks of a new communicator or 0, new peers); the cache is emptied."""

_ALLOC: Final = ACTIONS.index("alloc")


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A collective that a rank takes part in."""

    mark: int
    name: str
    layout: tuple[int, int, int]
    """Number of ranks, number of the group, this rank in it."""
    peer: int
    bytes: int
    ends: tuple[int, int]
    """The blocks that are read and build; -1 for none."""


@dataclass(frozen=True, kw_only=True)
class Requests:
    """All requests in order, with blocks numbered as they are allocated."""

    marks: tuple[Mark, ...]
    """Changes of phase and module."""
    columns: array[int]
    """Triples: kind of request and its two numbers."""
    claims: tuple[tuple[int, int, str], ...]
    """Mark, block and category of what is known of blocks."""
    exchanges: tuple[Exchange, ...]
    """Exchanges of ranks."""
    growing: frozenset[str]
    """Phases with a block whose size grows with depth: if memory is short a program may request less of those."""

    @staticmethod
    def of(pattern: Pattern, steps: int, sizes: Sizes) -> Requests:
        """Return those of a network `steps` in depth beyond the least.  Raises IndexError if a block is missing."""
        return _RequestBuilder(sizes, steps).build(pattern)

    def write(self, path: Path) -> None:
        """Write the file for a ghost: a line of JSON with the marks, then the requests."""
        path.write_bytes(json.dumps(marks_to_json(self.marks)).encode() + b"\n" + self.columns.tobytes())

    def traced(self, run: Trace) -> Trace:
        """Return the trace that a ghost wrote of these requests, with what is known of its blocks."""
        events = run.event_columns
        action, address = (np.frombuffer(events[name], dtype=np.int64) for name in ("action", "address"))
        born = address[action == _ALLOC].tolist()
        claims = (Claim(mark, born[block], category) for mark, block, category in self.claims if block < len(born))
        names = tuple(dict.fromkeys(exchange.name for exchange in self.exchanges))
        numbers = {name: number for number, name in enumerate(names)}
        log = b"".join(self._log(numbers, born, _count_completed_marks(run)))
        return replace(run, claims=tuple(claims), names=names, log=log)

    def _log(self, numbers: Mapping[str, int], born: list[int], marks: int) -> Iterator[bytes]:
        for exchange in self.exchanges:
            if exchange.mark >= marks or max(exchange.ends) >= len(born):  # memory ran out before
                return
            sent, received = (born[end] if end >= 0 else 0 for end in exchange.ends)
            name, mark, size = exchange.name, exchange.mark, exchange.bytes
            activity = Activity("collective", name, mark, 0, exchange.layout, exchange.peer, 0, size, sent, received)
            yield pack_activity(activity, numbers)


def _count_completed_marks(run: Trace) -> int:
    """Return the marks that a run completed: not the one in which memory ran out, whose exchanges are requested last.

    At the end of a run its recorder sets one more.
    """
    return len(run.marks) - (2 if run.outcome["kind"] == "oom" else 1)


class _RequestBuilder:
    """Turns tokens into requests, one after the other."""

    def __init__(self, sizes: Sizes, steps: int) -> None:
        self.sizes, self.steps = sizes, steps
        self.blocks = BlockRegistry()
        self.marks: list[Mark] = []
        self.columns: list[int] = []
        self.claims: list[tuple[int, int, str]] = []
        self.exchanges: list[tuple[int, str, tuple[int, int, int], int, int]] = []
        self.communicators = Communicators()
        self.ends: list[int] = []
        """Blocks, two for each exchange."""
        self.layers: dict[str, int] = {}

    def build(self, pattern: Pattern) -> Requests:
        """Return all requests of the pattern."""
        for stretch in pattern.stretches:
            writers = [self._writer(token) for token in stretch.tokens]
            for _ in range(self.steps if stretch.repeats else 1):
                for write in writers:
                    write()
        self._drop_last_mark()
        return Requests(
            marks=tuple(self.marks),
            columns=array("q", self.columns),
            claims=tuple(self.claims),
            exchanges=tuple(self._exchanges()),
            growing=self.sizes.phases,
        )

    def _exchanges(self) -> Iterator[Exchange]:
        ends = zip(self.ends[::2], self.ends[1::2], strict=True)
        for (mark, name, layout, peer, size), both_ends in zip(self.exchanges, ends, strict=True):
            yield Exchange(mark=mark, name=name, layout=layout, peer=peer, bytes=size, ends=both_ends)

    def _drop_last_mark(self) -> None:
        """Remove the last mark, which the recorder of a run sets at its end."""
        self.marks.pop()
        del self.columns[-3:]
        self.claims = [claim for claim in self.claims if claim[0] < len(self.marks)]

    def _writer(self, token: ResolvedToken) -> Callable[[], None]:
        """Return a function that writes the token, with all arguments that are the same each time."""
        kind, *facts = token.key
        reference = () if token.way < 0 else (token.way, token.first + token.more * self.steps)
        match kind:
            case "mark":
                return partial(self._mark, *facts, *reference)
            case "alloc":
                _, _, size, stream, _ = facts
                group = self.blocks.group(tuple(facts))
                return partial(self._alloc, group, self.sizes.bytes(size, self.steps), stream)
            case "free":
                return partial(self._free, self.blocks.group(facts[1]), *reference)
            case "claim":
                return partial(self._claim, facts[0], self.blocks.group(facts[1]), *reference)
            case "exchange":
                name, ranks, group_number, own_rank, peer, size = facts
                layout = (ranks, group_number, own_rank)
                return partial(self._exchange, name, layout, peer, self.sizes.bytes(size, self.steps))
            case "end":
                return partial(self._end, self.blocks.group(facts[0]) if facts[0] is not None else None, *reference)
        return partial(self._request, EMPTY, 0, 0)

    def _mark(self, step: int, phase: str, module: str, way: int = -1, value: int = 0) -> None:
        if way >= 0:
            list_name, _, rest = module.partition("#")
            layer = value + (self.layers.get(list_name, 0) if way == LAYERS_FURTHER else 0)
            self.layers[list_name] = layer
            module = f"{list_name}{layer}{rest}"
        self._request(MARK, len(self.marks), 0)
        self.marks.append(Mark(step, phase, module))

    def _alloc(self, group: BlockGroup, size: int, stream: int) -> None:
        self.blocks.add(group)
        self._request(ALLOC, size, stream)

    def _free(self, group: BlockGroup, way: int, value: int) -> None:
        block = self.blocks.block("free", group, way, value)
        self.blocks.end(block)
        self._request(FREE, block, 0)

    def _claim(self, category: str, group: BlockGroup, way: int, value: int) -> None:
        self.claims.append((len(self.marks) - 1, self.blocks.block("claim", group, way, value), category))

    def _exchange(self, name: str, layout: tuple[int, int, int], peer: int, size: int) -> None:
        self.exchanges.append((len(self.marks) - 1, name, layout, peer, size))
        first = self.communicators.use(layout, name, peer)
        if any(first):
            self._request(CONNECT, *first)

    def _end(self, group: BlockGroup | None, way: int = -1, value: int = 0) -> None:
        """Add one of the two ends of an exchange, which follow it."""
        exists = group is not None and group.born
        self.ends.append(self.blocks.block("end", group, way, value) if group is not None and exists else -1)

    def _request(self, kind: int, first: int, second: int) -> None:
        self.columns.extend((kind, first, second))
