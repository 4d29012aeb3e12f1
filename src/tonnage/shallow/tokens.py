"""A trace as a string of tokens that are the same for every layer: nothing in it counts layers, bytes or blocks.

A token is a change of phase or module, a block that is allocated or freed, or what is known of a block.  Blocks are
named by their label (where in the program they were allocated, and their size) and by which block with that label is
meant, by several schemes: the newest, the oldest, the next one after the last that was named.  The tokens of equal
layers are then equal, so a network of three layers and one of four differ by one stretch of tokens for each time that
the program goes through the layers.
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
from tonnage.recorder.tonnage_recorder.record_layout import ACTIONS
from tonnage.trace.trace import Activity, Claim, Trace

Label: TypeAlias = tuple[str, str, int, int, int]
"""Identity of a block: phase and module (without a layer's number) in which it was allocated, bytes (or the name
of bytes that grow with depth, `tonnage.shallow.sizes`), stream; if that is not enough to tell blocks apart, the
bytes of the one before it, else 0.
"""

Place: TypeAlias = tuple[str, str]
"""Phase and module, without a layer's number, in which a block is allocated.  Or EXCHANGE and its name."""

EXCHANGE: Final = "exchange"

_LAYER: Final = re.compile(r"(?<=\.)\d+(?=\.|$)")
LAYERS_FURTHER: Final = 0
"""The scheme that names a layer by its distance from the one before; the other scheme is its number."""

_ALLOC, _REQUESTED, _COMPLETED, *_EMPTIED = (
    ACTIONS.index(name) for name in ("alloc", "free_requested", "free_completed", "segment_free", "segment_unmap")
)
"""Actions by number.  If memory is not short, segments are freed (the last two) only when the cache is emptied."""


class Token(NamedTuple):
    """One event."""

    key: tuple[object, ...]
    """Identity of the event."""
    ways: tuple[int, ...]
    """The layer or block that is meant, by several schemes (`BlockRegistry`); empty if there is only one."""
    end: Label | None = None
    """The label of the block at an exchange's end, which is not certain and therefore not in `key`."""


END: Final = Token(("end",), ())
"""An end of an exchange whose block is not known."""

EMPTY: Final = Token(("empty",), ())
"""The allocator's cache is emptied."""


def without_layer(module: str) -> tuple[str, str, int]:
    """Return a module's name without the number of its layer, the name of its list, and the number; -1 for none."""
    number = _LAYER.search(module)
    if number is None:
        return module, "", -1
    return f"{module[: number.start()]}#{module[number.end() :]}", module[: number.start()], int(number.group())


class BlockGroup:
    """The blocks with one label."""

    __slots__ = ("alive", "born", "label", "last")

    def __init__(self, label: Label) -> None:
        self.label = label
        """The label of each of them."""
        self.born: list[int] = []
        """All of them so far."""
        self.alive: list[int] = []
        """Those that are not freed."""
        self.last: dict[str, int] = defaultdict(int)
        """The one that was named last in each series."""


@dataclass
class BlockRegistry:
    """The blocks so far, numbered in the order of allocation, and the schemes that name them."""

    _by_label: dict[Label, BlockGroup] = field(default_factory=dict)
    _groups: list[BlockGroup] = field(default_factory=list)
    _rank: list[int] = field(default_factory=list)
    _last: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def group(self, label: Label) -> BlockGroup:
        """Return the blocks with this label, of which there may be none yet."""
        group = self._by_label.get(label)
        if group is None:
            group = self._by_label[label] = BlockGroup(label)
        return group

    def add(self, group: BlockGroup) -> int:
        """Add a new block to a group and return its number."""
        number = len(self._groups)
        self._groups.append(group)
        self._rank.append(len(group.born))
        group.born.append(number)
        group.alive.append(number)
        return number

    def end(self, number: int) -> None:
        """Note that the block is freed."""
        alive = self._groups[number].alive
        if alive[-1] == number:  # nearly always
            alive.pop()
        else:
            del alive[bisect_left(alive, number)]

    @property
    def count(self) -> int:
        """Return how many blocks there were."""
        return len(self._groups)

    def label(self, number: int) -> Label:
        """Return the label of a block."""
        return self._groups[number].label

    def ways(self, series: str, number: int) -> tuple[int, ...]:
        """Return the value of every scheme for the block; a `series` is a sequence of blocks named in turn."""
        group, rank, last = self._groups[number], self._rank[number], self._last
        alive = group.alive
        index = bisect_left(alive, number)
        is_alive = index < len(alive) and alive[index] == number
        since, last[series] = number - last[series], number
        further, group.last[series] = rank - group.last[series], rank
        return (
            len(alive) - 1 - index if is_alive else -1,
            index if is_alive else -1,
            len(group.born) - 1 - rank,
            further,
            rank,
            since,
        )

    def block(self, series: str, group: BlockGroup, way: int, value: int) -> int:
        """Return the block that a scheme's value names.  Raises IndexError if it does not exist in the group."""
        if way == _SINCE:
            number = self._last[series] + value
            if number < 0 or self._groups[number] is not group:
                raise IndexError
        else:
            numbers = group.alive if way in _AMONG_ALIVE else group.born
            index = len(numbers) - 1 - value if way in _FROM_LAST else value
            if way == _FURTHER:
                index += group.last[series]
            if index < 0:
                raise IndexError
            number = numbers[index]
        self._last[series] = number
        group.last[series] = self._rank[number]
        return number


_NEWEST, _OLDEST, YOUNGEST, _FURTHER, _FIRST, _SINCE = range(6)
IN_SERIES: Final = (_SINCE, _FURTHER)
"""Schemes that depend on the block named before."""
_AMONG_ALIVE: Final = (_NEWEST, _OLDEST)
_FROM_LAST: Final = (_NEWEST, YOUNGEST)


def tokens(
    trace: Trace, names: Mapping[tuple[Place, int], int] = MappingProxyType({}), *, by_neighbour: bool = False
) -> list[Token]:
    """Return the trace of a completed step as tokens; `names` are those of sizes that grow with depth.

    With `by_neighbour` labels include the block that was allocated before: an adapter may be as large as the scales
    of a quantized weight.

    Raises CannotEstimate if the step ran out of memory, or if blocks are freed later than the program releases them
    (on several streams), which tokens cannot express.
    """
    if trace.outcome.get("kind") != "completed" or trace.peaks.get("ooms") or trace.repeated:
        raise CannotEstimate("Only a step that completed without a shortage can be extended to more layers.")
    return _Tokenizer(trace, names, by_neighbour).tokens()


class _Tokenizer:
    """Goes through a trace once."""

    def __init__(self, trace: Trace, names: Mapping[tuple[Place, int], int], by_neighbour: bool) -> None:
        self.trace = trace
        self.names = names
        self.by_neighbour = by_neighbour
        self.before = 0
        """Bytes, or their name, of the block that was allocated last."""
        self.blocks = BlockRegistry()
        self.at: dict[int, int] = {}
        """The block that begins at an address."""
        self.starts: list[int] = []
        """Addresses of blocks, ascending."""
        self.address: list[int] = []
        """Address of each block."""
        self.bytes: list[int] = []
        """Bytes of each block."""
        self.streams: dict[int, int] = {0: 0}
        self.layers: dict[str, int] = defaultdict(int)

    def tokens(self) -> list[Token]:
        """Return the trace's tokens in order."""
        tokens: list[Token] = []
        claims, exchanges = _group_by_mark(self.trace.claims), _group_by_mark(self.trace.activities("collective"))
        events = self._events()
        for number, mark in enumerate(self.trace.marks):
            tokens.append(self._mark_token(mark.step, mark.phase, mark.module))
            if number in claims:
                tokens += self._claim_tokens(claims[number])
            first = self.blocks.count
            if number in events:
                self._add_events(events[number], mark.phase, without_layer(mark.module)[0], tokens)
            for exchange in exchanges.get(number, ()):
                ranks, group, mine = exchange.grid
                size_name = self._size_or_name((EXCHANGE, exchange.name), exchange.bytes)
                tokens.append(Token((EXCHANGE, exchange.name, ranks, group, mine, exchange.block, size_name), ()))
                for address, size in zip((exchange.address, exchange.address2), _end_sizes(exchange), strict=True):
                    block = self._find_exchanged(address, size, first)
                    tokens.append(END if block is None else self._end_token(block))
                    first = max(first, -1 if block is None else block)
        return tokens

    def _claim_tokens(self, claims: Iterable[Claim]) -> Iterator[Token]:
        """Yield what is known of blocks, sorted."""
        pairs = {(claim.category, self._find_block(claim.address)) for claim in claims}
        known = sorted((self.blocks.label(block), category, block) for category, block in pairs if block is not None)
        for _, category, block in known:
            yield self._block_token("claim", category, block)

    def _mark_token(self, step: int, phase: str, module: str) -> Token:
        name, list_name, layer = without_layer(module)
        if layer < 0:
            return Token(("mark", step, phase, name), ())
        since, self.layers[list_name] = layer - self.layers[list_name], layer
        return Token(("mark", step, phase, name), (since, layer))

    def _block_token(self, kind: str, category: str, block: int) -> Token:
        return Token((kind, category, self.blocks.label(block)), self.blocks.ways(kind, block))

    def _end_token(self, block: int) -> Token:
        return Token(END.key, self.blocks.ways("end", block), self.blocks.label(block))

    def _events(self) -> dict[int, list[tuple[int, int, int, int]]]:
        """Return by mark each allocation, free and emptying of the cache: action, address, bytes and stream.

        Raises CannotEstimate if peaks depend on blocks that are freed later than the program releases them.
        """
        columns = {name: np.array(column, dtype=np.int64) for name, column in self.trace.event_columns.items()}
        action, size, latest = columns["action"], columns["size"], np.maximum.accumulate(columns["mark"])
        if self._peaks(latest, action, size, _REQUESTED) != self._peaks(latest, action, size, _COMPLETED):
            raise CannotEstimate("Its peaks depend on blocks that are freed later than the program releases them.")
        blocks = np.flatnonzero(np.isin(action, (_ALLOC, _COMPLETED, *_EMPTIED)))
        facts = (action, columns["address"], size, columns["stream"])
        by_mark: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
        events = zip(*(fact[blocks].tolist() for fact in facts), strict=True)
        for mark, event in zip(latest[blocks].tolist(), events, strict=True):
            by_mark[mark].append(event)
        return by_mark

    def _peaks(self, latest: Any, action: Any, size: Any, ends: int) -> dict[str, int]:
        """Return the most bytes in use in each phase, counted from allocation to this kind of event."""
        change = np.where(action == _ALLOC, size, np.where(action == ends, -size, 0))
        level, rises = np.cumsum(change), change > 0
        names = list(dict.fromkeys(mark.phase for mark in self.trace.marks))
        phase = np.array([names.index(mark.phase) for mark in self.trace.marks])[latest]
        within = {name: level[rises & (phase == number)] for number, name in enumerate(names)}
        return {name: int(levels.max(initial=0)) for name, levels in within.items()}

    def _add_events(
        self, events: Sequence[tuple[int, int, int, int]], phase: str, module: str, tokens: list[Token]
    ) -> None:
        """Append the tokens of events; blocks freed one after the other are sorted, as their order has no meaning."""
        ended: list[int] = []
        for action, address, size, stream in events:
            if action == _COMPLETED:
                ended.append(self.at[address])
                continue
            if ended:
                self._free(ended, tokens)
                ended.clear()
            if action in _EMPTIED:
                if tokens[-1:] != [EMPTY]:
                    tokens.append(EMPTY)
                continue
            size_name = self._size_or_name((phase, module), size)
            before = self.before if self.by_neighbour else 0
            label = (phase, module, size_name, self.streams.setdefault(stream, len(self.streams)), before)
            self.before = size_name
            self.at[address] = self.blocks.add(self.blocks.group(label))
            self.address.append(address)
            self.bytes.append(size)
            insort(self.starts, address)
            tokens.append(Token(("alloc", *label), ()))
        self._free(ended, tokens)

    def _size_or_name(self, place: Place, size: int) -> int:
        """Return the name of a size that grows with depth, else the size itself."""
        return self.names.get((place, size), size) if self.names else size

    def _free(self, blocks: list[int], tokens: list[Token]) -> None:
        label = self.blocks.label
        for block in sorted(blocks, key=lambda block: (label(block), block)) if len(blocks) > 1 else blocks:
            tokens.append(self._block_token("free", "", block))
            self.blocks.end(block)
            address = self.address[block]
            del self.at[address], self.starts[bisect_left(self.starts, address)]

    def _find_block(self, address: int) -> int | None:
        """Return the live block that contains an address."""
        index = bisect_right(self.starts, address) - 1
        if index < 0:
            return None
        block = self.at[self.starts[index]]
        return block if address < self.starts[index] + max(self.bytes[block], 1) else None

    def _find_exchanged(self, address: int, size: int, first: int) -> int | None:
        """Return the block that an exchange reads or writes: allocated within its mark (from `first` on), or before.

        The order of exchanges within the mark is known, but not when they happen; of several blocks at the address
        the next one of the exchange's size is taken.
        """
        candidates = [block for block in range(first, len(self.address)) if self.address[block] == address]
        before = self._find_block(address)
        candidates += [before] if before is not None and before < first else []
        of_size = [block for block in candidates if self.bytes[block] == size]
        return next(iter(of_size or candidates), None)


def _end_sizes(exchange: Activity) -> tuple[int, int]:
    """Return the bytes that a rank sends and receives; the log has those of one rank's part."""
    ranks = exchange.grid[0]
    return (
        exchange.bytes * (ranks if exchange.name == "ReduceScatter" else 1),
        exchange.bytes * (ranks if exchange.name == "AllGather" else 1),
    )


def _group_by_mark(items: Iterable[Any]) -> dict[int, list[Any]]:
    groups: dict[int, list[Any]] = defaultdict(list)
    for item in items:
        groups[item.mark].append(item)
    return groups
