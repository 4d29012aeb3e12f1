"""Makes known requests of steps for memory, without running the program.

The real allocator is asked for each block, in order, with its size and stream, and gets back the blocks that steps
free.  It need not record blocks, which are known here and take longer to record than to serve; only its segments are
read from its history.
"""

import ctypes
import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tonnage_recorder import written
from tonnage_recorder.native import Allocator, Asked
from tonnage_recorder.records import OF_CARD, RECORD

MARK, ALLOC, FREE, CONNECT, EMPTY = range(5)
"""Kinds of requests, three numbers each: a mark begins (its number); a block is handed out (bytes, stream) or taken
back (its number); ranks exchange for the first time (ranks of a new communicator or 0, new peers); the cache is
emptied."""

_AT_ONCE = 256
"""Number of requests that are made from Python before the ghost goes on by itself."""

_BLOCKS = ("alloc", "free_requested", "free_completed")
_ALLOCATED, _REQUESTED = (written.CODES[name] for name in _BLOCKS[:2])


def read(path: str, watch: Any) -> "Requested":
    """Return the requests that `tonnage.shallow.requests` wrote: a line of JSON with their marks, then numbers."""
    header, _, numbers = Path(path).read_bytes().partition(b"\n")
    document = json.loads(header)
    phases, modules = document["phases"], document["modules"]
    requests = array("q")
    requests.frombytes(numbers)
    watch.marks.clear()
    marks = [(step, phases[phase], modules[module]) for step, phase, module in document["rows"]]
    return Requested(watch, marks, requests, numbered=True)


class Requested:
    """Requests to be made one by one, after those of a program (`before` has its events).

    With `numbered`, streams are numbers, for which streams other than 0 have yet to be created.
    """

    def __init__(
        self,
        watch: Any,
        marks: list[tuple[int, str, str]],
        requests: "array[int]",
        repeated: Sequence[int] = (),
        before: "dict[str, array[int]] | None" = None,
        *,
        numbered: bool = False,
    ) -> None:
        self.watch = watch
        self.marks = marks
        self.rows = np.array(requests, dtype=np.int64).reshape(-1, 3)
        self.repeated = repeated
        self.before = before
        self.first_mark = len(watch.marks)
        self._numbered = numbered
        self._addresses = array("q", bytes(8 * np.count_nonzero(self.rows[:, 0] == ALLOC)))
        self._asked = Asked(self.rows.ctypes.data, len(self.rows), 0, self._addresses.buffer_info()[0], 0)
        self._logged = 0

    def make(self) -> None:
        """Make all requests.

        Raises torch.OutOfMemoryError where the steps would have, and RuntimeError for NCCL.
        """
        self.watch.torch.cuda.init()
        if self._numbered:
            self._make_streams()
        _leave_out_blocks(self.watch.torch)
        native, asked, allocator = self.watch.native, self._asked, _for_c(self.watch.torch)
        self._logged = native.log_count()
        while asked.made < asked.count:
            made = asked.made
            if allocator is not None:
                native.make_requests(asked, allocator)
            self._begin(self.rows[made : asked.made])
            self._make(self.rows[asked.made : asked.made + _AT_ONCE].tolist())
        self.watch.add_step()

    def _make_streams(self) -> None:
        """Create a stream for each number but 0, in the order of their first use."""
        torch, streams = self.watch.torch, self.rows[:, 2]
        of_blocks = self.rows[:, 0] == ALLOC
        made = {
            number: torch.cuda.Stream().cuda_stream for number in dict.fromkeys(streams[of_blocks].tolist()) if number
        }
        for number, stream in made.items():
            streams[of_blocks & (streams == number)] = stream

    def _begin(self, rows: Any) -> None:
        """Begin the marks among requests that were made."""
        for number in rows[rows[:, 0] == MARK, 1].tolist():
            self.watch.marks.append(self.marks[number])
            self.watch.steps = self.marks[number][0]

    def _make(self, rows: list[tuple[int, int, int]]) -> None:
        """Make requests from Python, of all kinds, with torch's own error if memory runs out."""
        torch, asked, addresses, native = self.watch.torch, self._asked, self._addresses, self.watch.native
        allocate = torch._C._cuda_cudaCachingAllocator_raw_alloc
        give_back = torch._C._cuda_cudaCachingAllocator_raw_delete
        native.mark(asked.blocks)
        for kind, first, second in rows:
            if kind == FREE:
                give_back(addresses[first])
            elif kind == ALLOC:
                addresses[asked.blocks] = allocate(first, second)
                asked.blocks += 1
                native.mark(asked.blocks)
            elif kind == CONNECT:
                native.take_for_nccl(first, second)
            elif kind == EMPTY:
                torch._C._cuda_emptyCache()
            else:
                self.watch.marks.append(self.marks[first])
                self.watch.steps = self.marks[first][0]
            asked.made += 1

    def columns(self) -> "dict[str, array[int]]":
        """Return all events as the allocator would have recorded them: its segments among the requested blocks."""
        begun = [mark for mark in self.repeated if mark < len(self.watch.marks)]
        self.watch.repeated = begun if len(begun) > 1 else []  # if the memory did not run out before
        blocks = self._block_events()
        segments, before = self._segment_events()
        born = np.append(np.flatnonzero(blocks["action"] == _ALLOCATED), len(blocks["action"]))
        positions = born[before]
        reached = len(self.watch.marks) - 1  # of segments after the last block, or before any was handed out
        segments["mark"] = np.append(blocks["mark"], reached)[positions]
        columns = {}
        for name, column in blocks.items():
            columns[name] = self.before[name][:] if self.before is not None else array("q")
            columns[name].frombytes(np.insert(column, positions, segments[name]).tobytes())
        return columns

    def _block_events(self) -> dict[str, Any]:
        """Return one event for each block that was handed out, and two for each that was freed."""
        kind, first, second = self.rows[: self._asked.made].T
        allocated, asked = kind == ALLOC, (kind == ALLOC) | (kind == FREE)
        number = np.where(allocated, np.cumsum(allocated) - 1, first)[asked]
        events = np.where(kind[asked] == FREE, 2, 1)
        block = np.repeat(number, events)
        of_two = np.arange(len(block)) - np.repeat(np.cumsum(events) - events, events)
        return {
            "action": np.where(np.repeat(events, events) == 2, _REQUESTED + of_two, _ALLOCATED),
            "address": np.array(self._addresses)[block],
            "size": first[allocated][block],
            "stream": second[allocated][block],
            "mark": np.repeat((np.cumsum(kind == MARK) - 1)[asked], events) + self.first_mark,
        }

    def _segment_events(self) -> tuple[dict[str, Any], Any]:
        """Return the events that the allocator itself recorded, and for each the block before which it was.

        The allocator records its requests of the card, whole or in pieces, and the ghost the block that each was for.
        """
        native = self.watch.native
        log = np.frombuffer(native.log_bytes(), dtype=RECORD)[self._logged :]
        native.log_cut(self._logged)
        of_card = log[np.isin(log["kind"], OF_CARD)]
        rest = [event for event in written.events(self.watch.torch) if event["action"] not in _BLOCKS]
        columns = written.columns_of(written.fields_of(rest))
        events = {name: np.array(column, dtype=np.int64) for name, column in columns.items()}
        moves = events["action"] != written.CODES["oom"]
        moved = np.cumsum(np.where(moves, events["size"], 0))
        pieces = np.append(np.cumsum(of_card["bytes"], dtype=np.int64), -1)
        requests = np.searchsorted(pieces[:-1], moved)
        if not np.array_equal(pieces[requests[moves]], moved[moves]):
            raise RuntimeError("the allocator's segments do not agree with the ghost's log of the card's memory")
        blocks = np.append(of_card["mark"], self._asked.blocks)
        return events, np.where(moves, blocks[requests], self._asked.blocks).astype(int)


_FOR_C = (
    "aoti_torch_cuda_caching_allocator_raw_alloc",
    "aoti_torch_cuda_caching_allocator_raw_delete",
    "aoti_torch_create_cuda_stream_guard",
    "aoti_torch_delete_cuda_stream_guard",
)
"""Functions of torch's C interface for the fields of `Allocator`, in their order."""


def _for_c(torch: Any) -> Allocator | None:
    """Return the allocator's C functions; None if torch has none (before 2.10)."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
    if not all(hasattr(library, name) for name in _FOR_C):
        return None
    return Allocator(*(ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in _FOR_C))


def _leave_out_blocks(torch: Any) -> None:
    """Clear the allocator's history, and leave blocks out of it if torch can (2.11 and later)."""
    record = torch.cuda.memory._record_memory_history
    try:
        record("all", context=None, clear_history=True, skip_actions=list(_BLOCKS))
    except TypeError:
        record("all", context=None, clear_history=True)
