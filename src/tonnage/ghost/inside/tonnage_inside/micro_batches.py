"""Repeats the memory requests of a micro-batch for those that are like it, without running the program.

All micro-batches of a step but the first allocate alike: blocks that one of them allocated and freed are allocated
and freed again, in the same order, sizes and streams, under marks of the same phases and modules, by the real
allocator in its current state.  The first one creates the gradients.  If they are averaged each time, each of the
others creates as many bytes, adds them to the gradients and frees them at once, and is otherwise like the first.

This takes microseconds a block, where the program takes a tenth of a second and more.
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
    """Memory ran out in a repeated micro-batch, for which there is no stack."""


class _Requests(NamedTuple):
    """The requests of a micro-batch."""

    requests: list[tuple[int, int, bool]]
    """Mark, index of a block in the lists below, and whether it is allocated or freed, in order."""
    address: list[int]
    """Address of each block."""
    size: list[int]
    stream: list[int]
    marks: list[tuple[int, str, str]]
    """Marks of the micro-batch; the first has the number `first_mark`."""
    first_mark: int
    claims: list[tuple[int, int, str]]
    records: list[tuple[int, bytes, int, int]]
    """Other work for the card: mark, record and its two addresses."""


class Alike:
    """Repeats micro-batches; `ask` listens to `tonnage.step.repeats`.

    `as_first` is true if the first is like the others, but for the gradients that it keeps.
    """

    def __init__(self, watch: Any, *, as_first: bool) -> None:
        self.watch = watch
        self.as_first = as_first
        self._begin()

    def ask(self, made: int, left: int) -> bool:
        """Repeat the last of the micro-batches `made` for those that are left, if possible; return whether it was.

        Raises RanOut.
        """
        requests = self._read_requests(keeps_gradients=made == 1) if made > 1 or (made and self.as_first) else None
        if requests is None:
            self._begin()
            return False
        for _ in range(left):
            _repeat(self.watch, requests)
            self.watch.alike += 1
        return True

    def _begin(self) -> None:
        """Note where the requests of the next micro-batch begin."""
        torch = self.watch.torch
        self._handed = 0
        if torch.cuda.is_initialized():
            counts = torch._C._cuda_memoryStats(torch.cuda.current_device())["allocation"]["all"]
            self._handed = int(counts["allocated"] + counts["freed"])
        self._first_mark, self._first_claim = len(self.watch.marks), len(self.watch.claims)
        self._first_record = self.watch.native.log_count()

    def _read_requests(self, *, keeps_gradients: bool) -> _Requests | None:
        """Return the requests of the last micro-batch; None if it did not leave memory as it was before."""
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
            kept &= ~gradients  # blocks that are created once, and exist for the others
        elif kept.any():
            return None
        born, died, under = born[~kept], died[~kept], under[~kept]
        order = np.argsort(np.concatenate((born, died)), kind="stable")
        asked_under = np.maximum(np.concatenate((mark[born], under))[order], self._first_mark - 1).tolist()
        block, taken = (order % max(len(born), 1)).tolist(), (order < len(born)).tolist()
        return _Requests(
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
        marks, addresses, second_addresses = (fields[name].tolist() for name in ("mark", "address", "address2"))
        size = RECORD.itemsize
        return [
            (marks[index], log[size * index : size * (index + 1)], addresses[index], second_addresses[index])
            for index in kept
        ]

    def _hold_gradients(self, address: Any, size: Any) -> Any:
        """Return which blocks hold gradients, by the claims at the end of the micro-batch."""
        claims = self.watch.claims[self._first_claim :]
        known = np.array(sorted(start for _, start, category in claims if category == "gradient"), dtype=np.int64)
        return np.searchsorted(known, address) < np.searchsorted(known, address + size)


def _before_the_next(born: Any, action: Any, mark: Any) -> Any:
    """Return, for each block, the first event after it that has another mark or hands out a block."""
    changes = np.flatnonzero((action == _ALLOCATED) | np.append(True, mark[1:] != mark[:-1]))
    return np.append(changes, len(action))[np.searchsorted(changes, born, side="right")]


def _repeat(watch: Any, source: _Requests) -> None:
    """Make all requests of a micro-batch once more.  Raises RanOut."""
    blocks = _Blocks(source)
    requests, claims, records = (_by_mark(rows) for rows in (source.requests, source.claims, source.records))
    marks = enumerate((None, *source.marks), source.first_mark - 1)  # its batch comes before its first mark
    for number, mark in marks:
        if mark is not None:
            watch.mark(*mark[1:])
        blocks.forget()
        for _, address, category in claims.get(number, ()):
            watch.claims.append((len(watch.marks) - 1, blocks.translate(address), category))
        for _, block, is_taken in requests.get(number, ()):
            _request(watch.torch, blocks, block, is_taken)
        for _, record, address, address2 in records.get(number, ()):
            watch.native.log_add(record, blocks.translate(address), blocks.translate(address2))


def _by_mark(rows: list[Any]) -> dict[int, list[Any]]:
    """Return rows, which are in the order of their marks, by mark."""
    return {mark: list(group) for mark, group in groupby(rows, key=itemgetter(0))}


def _request(torch: Any, blocks: "_Blocks", block: int, is_taken: bool) -> None:
    if not is_taken:
        torch._C._cuda_cudaCachingAllocator_raw_delete(blocks.give_back(block))
        return
    source = blocks.source
    try:
        address = torch._C._cuda_cudaCachingAllocator_raw_alloc(source.size[block], source.stream[block])
    except torch.OutOfMemoryError as error:
        raise RanOut from error
    blocks.take(block, address)


class _Blocks:
    """Current addresses of the blocks that a micro-batch had elsewhere."""

    def __init__(self, source: _Requests) -> None:
        self.source = source
        self.starts: list[int] = []
        """Former addresses, in order, of blocks that exist or existed under this mark."""
        self.blocks: dict[int, int] = {}
        """Block by its former address."""
        self.addresses: dict[int, int] = {}
        """Current address of each block."""
        self.gone: list[int] = []

    def take(self, block: int, address: int) -> None:
        start = self.source.address[block]
        if start not in self.blocks:
            insort(self.starts, start)
        self.blocks[start] = block
        self.addresses[block] = address

    def give_back(self, block: int) -> int:
        """Return the address of a block that is freed; it can be translated until the next mark."""
        self.gone.append(block)
        return self.addresses[block]

    def forget(self) -> None:
        """Forget the blocks that were freed, when another mark begins."""
        for block in self.gone:
            start = self.source.address[block]
            if self.blocks.get(start) == block:
                del self.blocks[start]
                del self.starts[bisect_right(self.starts, start) - 1]
        self.gone.clear()

    def translate(self, address: int) -> int:
        """Return the current address for a former one; the same if no block of the micro-batch held it."""
        index = bisect_right(self.starts, address) - 1
        if index < 0:
            return address
        block = self.blocks[self.starts[index]]
        offset = address - self.source.address[block]
        return self.addresses[block] + offset if offset < self.source.size[block] else address
