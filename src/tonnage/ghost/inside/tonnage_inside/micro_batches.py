"""Micro-batches that ask for what one before them asked for, asked for once more without their program.

All micro-batches of a step but the first do the same: what one of them took and gave back is taken and given back
again, in the same order, sizes and streams, under marks of the same phases and modules, by the real allocator in the
state in which it was left.  The first one makes the gradients.  Where they are averaged each time, each of the others
makes as much, adds it to what is there and gives it back at once, and is otherwise like the first.

Costs microseconds a block, where the program takes a tenth of a second and more.
"""

from bisect import bisect_right, insort
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from tonnage_recorder import written
from tonnage_recorder.records import OF_CARD, PINNED, RECORD

from .repeating import lives

_ALLOCATED, _REQUESTED = (written.CODES[name] for name in ("alloc", "free_requested"))


class RanOut(Exception):
    """The memory ran out in a micro-batch that was not made, of which no stack can be told."""


class _Found(NamedTuple):
    """What a micro-batch asked for."""

    requests: list[tuple[int, int, bool]]
    """In order: the mark under which a block, by its place in the lists below, was taken, or else given back."""
    address: list[int]
    """Of each block."""
    size: list[int]
    stream: list[int]
    marks: list[tuple[int, str, str]]
    """Under which it was asked for; the first has the number `first_mark`."""
    first_mark: int
    claims: list[tuple[int, int, str]]
    records: list[tuple[int, bytes, int, int]]
    """What it asked of the card besides: mark, record and its two addresses."""


class Alike:
    """Asks for micro-batches once more; `ask` listens to `tonnage.step.repeats`.

    `as_first`: whether the first is like the others, but for the gradients that it keeps.
    """

    def __init__(self, watch: Any, *, as_first: bool) -> None:
        self.watch = watch
        self.as_first = as_first
        self._begin()

    def ask(self, made: int, left: int) -> bool:
        """Whether so many micro-batches, like the last of those made before, were asked for: they need not be made.

        Raises RanOut.
        """
        found = self._found(keeps_gradients=made == 1) if made > 1 or (made and self.as_first) else None
        if found is None:
            self._begin()
            return False
        for _ in range(left):
            _make(self.watch, found)
            self.watch.alike += 1
        return True

    def _begin(self) -> None:
        """A micro-batch begins."""
        torch = self.watch.torch
        self._handed = 0
        if torch.cuda.is_initialized():
            counts = torch._C._cuda_memoryStats(torch.cuda.current_device())["allocation"]["all"]
            self._handed = int(counts["allocated"] + counts["freed"])
        self._first_mark, self._first_claim = len(self.watch.marks), len(self.watch.claims)
        self._first_record = self.watch.native.log_count()

    def _found(self, *, keeps_gradients: bool) -> _Found | None:
        """What the micro-batch asked for that was made last; None where it did not leave what it found."""
        traced = written.event_columns(self.watch.torch, self.watch)
        columns = {name: np.frombuffer(column, dtype=np.int64) for name, column in traced.items()}
        action, mark = columns["action"], np.maximum.accumulate(columns["mark"])
        handed = np.cumsum((action == _ALLOCATED) | (action == _REQUESTED))
        self.watch.read_history(traced, int(handed[-1]) if len(handed) else 0)
        begun = int(np.searchsorted(handed, self._handed, side="right"))
        born, died = lives(action, columns["address"])
        if np.any((born < begun) & (begun <= died) & (died < len(action))):
            return None
        born, died = born[born >= begun], died[born >= begun]
        under = np.append(mark, 0)[died]
        kept = died == len(action)
        if keeps_gradients:
            gradients = kept & self._hold_gradients(columns["address"][born], columns["size"][born])
            died = np.where(gradients, _before_the_next(born, action, mark) - 0.5, died)
            under = np.where(gradients, mark[born], under)
            kept &= ~gradients  # what is made once, and is there for the others
        elif kept.any():
            return None
        born, died, under = born[~kept], died[~kept], under[~kept]
        order = np.argsort(np.concatenate((born, died)), kind="stable")
        asked_under = np.maximum(np.concatenate((mark[born], under))[order], self._first_mark - 1).tolist()
        block, taken = (order % max(len(born), 1)).tolist(), (order < len(born)).tolist()
        return _Found(
            requests=list(zip(asked_under, block, taken, strict=True)),
            address=columns["address"][born].tolist(),
            size=columns["size"][born].tolist(),
            stream=columns["stream"][born].tolist(),
            marks=self.watch.marks[self._first_mark :],
            first_mark=self._first_mark,
            claims=self.watch.claims[self._first_claim :],
            records=self._records(),
        )

    def _records(self) -> list[tuple[int, bytes, int, int]]:
        log = self.watch.native.log_bytes()[self._first_record * RECORD.itemsize :]
        fields = np.frombuffer(log, dtype=RECORD)
        kept = np.flatnonzero(~np.isin(fields["kind"], (*OF_CARD, *PINNED))).tolist()
        marks, one, other = (fields[name].tolist() for name in ("mark", "address", "address2"))
        size = RECORD.itemsize
        return [(marks[place], log[size * place : size * (place + 1)], one[place], other[place]) for place in kept]

    def _hold_gradients(self, address: Any, size: Any) -> Any:
        """Which blocks hold gradients, by what is known at the end of the micro-batch."""
        claims = self.watch.claims[self._first_claim :]
        known = np.array(sorted(place for _, place, category in claims if category == "gradient"), dtype=np.int64)
        return np.searchsorted(known, address) < np.searchsorted(known, address + size)


def _before_the_next(born: Any, action: Any, mark: Any) -> Any:
    """For each block the first event after it of another mark or that hands out a block."""
    changes = np.flatnonzero((action == _ALLOCATED) | np.append(True, mark[1:] != mark[:-1]))
    return np.append(changes, len(action))[np.searchsorted(changes, born, side="right")]


def _make(watch: Any, found: _Found) -> None:
    """Ask for all of it once more, behind what was asked for before.  Raises RanOut."""
    moved = _Moved(found)
    requests, claims, records = (_by_mark(rows) for rows in (found.requests, found.claims, found.records))
    for place, mark in enumerate((None, *found.marks), found.first_mark - 1):  # its batch comes before its first mark
        if mark is not None:
            watch.mark(*mark[1:])
        moved.forget()
        for _, address, category in claims.get(place, ()):
            watch.claims.append((len(watch.marks) - 1, moved.now(address), category))
        for _, block, is_taken in requests.get(place, ()):
            _ask(watch.torch, moved, block, is_taken)
        for _, record, address, address2 in records.get(place, ()):
            watch.native.log_add(record, moved.now(address), moved.now(address2))


def _by_mark(rows: list[Any]) -> dict[int, list[Any]]:
    """Rows, which come in the order of their marks, by these."""
    return {mark: list(some) for mark, some in groupby(rows, key=itemgetter(0))}


def _ask(torch: Any, moved: "_Moved", block: int, is_taken: bool) -> None:
    if not is_taken:
        torch._C._cuda_cudaCachingAllocator_raw_delete(moved.give_back(block))
        return
    found = moved.found
    try:
        taken = torch._C._cuda_cudaCachingAllocator_raw_alloc(found.size[block], found.stream[block])
    except torch.OutOfMemoryError as error:
        raise RanOut from error
    moved.take(block, taken)


class _Moved:
    """Where blocks are now that a micro-batch had elsewhere."""

    def __init__(self, found: _Found) -> None:
        self.found = found
        self.starts: list[int] = []
        """Where blocks that are there, or were under this mark, began before, in order."""
        self.blocks: dict[int, int] = {}
        """The block that began there."""
        self.addresses: dict[int, int] = {}
        """Where each block is now."""
        self.gone: list[int] = []

    def take(self, block: int, address: int) -> None:
        start = self.found.address[block]
        if start not in self.blocks:
            insort(self.starts, start)
        self.blocks[start] = block
        self.addresses[block] = address

    def give_back(self, block: int) -> int:
        """Where it is; until the next mark it can still be asked for."""
        self.gone.append(block)
        return self.addresses[block]

    def forget(self) -> None:
        """Another mark begins: what was given back is gone."""
        for block in self.gone:
            start = self.found.address[block]
            if self.blocks.get(start) == block:
                del self.blocks[start]
                del self.starts[bisect_right(self.starts, start) - 1]
        self.gone.clear()

    def now(self, address: int) -> int:
        """Where what was at an address is; there, if no block of the micro-batch held it."""
        place = bisect_right(self.starts, address) - 1
        if place < 0:
            return address
        block = self.blocks[self.starts[place]]
        within = address - self.found.address[block]
        return self.addresses[block] + within if within < self.found.size[block] else address
