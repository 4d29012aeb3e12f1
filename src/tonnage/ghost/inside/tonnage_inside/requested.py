"""Steps without their program: what they ask of the allocator is known.

The real allocator is asked for each block, in order, with its size and stream, and gets back what steps give back.
It need not write down what is known here, which takes longer than to serve it; only its segments are read off it.
"""

import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import written

MARK, ALLOC, FREE, CONNECT, EMPTY = range(5)
"""Kinds of requests, three numbers each: a mark begins (its number); a block is handed out (bytes, stream) or taken
back (its number); ranks exchange for the first time (ranks of a new communicator or 0, new peers); the cache is
emptied."""

_BLOCKS = ("alloc", "free_requested", "free_completed")
_ALLOCATED, _REQUESTED = (written.ACTIONS[name] for name in _BLOCKS[:2])


def read(path: str, watch: Any) -> "Requested":
    """The requests of `tonnage.layers.requests` in a file: a line of JSON with their marks, then the numbers."""
    header, _, numbers = Path(path).read_bytes().partition(b"\n")
    document = json.loads(header)
    phases, modules = document["phases"], document["modules"]
    requests = array("q")
    requests.frombytes(numbers)
    watch.marks.clear()
    marks = [(step, phases[phase], modules[module]) for step, phase, module in document["rows"]]
    return Requested(watch, marks, requests)


class Requested:
    """Requests to be made one by one, behind those that a program has made (`before`, the events of it)."""

    def __init__(
        self,
        watch: Any,
        marks: list[tuple[int, str, str]],
        requests: "array[int]",
        repeated: Sequence[int] = (),
        before: "dict[str, array[int]] | None" = None,
    ) -> None:
        self.watch = watch
        self.marks = marks
        self.requests = requests
        self.repeated = repeated
        self.before = before
        self.first_mark = len(watch.marks)
        self.addresses: list[int] = []
        self.streams: dict[int, int] = {0: 0}
        self._left_out = False
        self._connected = 0

    def make(self) -> None:
        """Ask for all of them.

        Raises torch.OutOfMemoryError where the steps would have, and RuntimeError for NCCL.
        """
        torch, addresses, marks, streams = self.watch.torch, self.addresses, self.marks, self.streams
        allocate = torch._C._cuda_cudaCachingAllocator_raw_alloc
        give_back = torch._C._cuda_cudaCachingAllocator_raw_delete
        torch.cuda.init()
        self._left_out = _leave_out_blocks(torch)
        note = torch._C._cuda_setMemoryMetadata if self._left_out else _nothing
        begin = self.watch.marks.append
        for kind, first, second in zip(self.requests[::3], self.requests[1::3], self.requests[2::3], strict=True):
            if kind == FREE:
                give_back(addresses[first])
            elif kind == ALLOC:
                if second not in streams:
                    streams[second] = torch.cuda.Stream().cuda_stream
                note(str(len(addresses)))  # a segment that it takes is noted with it
                addresses.append(allocate(first, streams[second]))
            elif kind == CONNECT:
                self.watch.native.take_for_nccl(first, second)
                self._connected += 1
            elif kind == EMPTY:
                note(str(len(addresses)))
                torch._C._cuda_emptyCache()
            else:
                begin(marks[first])
                self.watch.steps = marks[first][0]
        self.watch.step_made()

    def columns(self) -> "dict[str, array[int]]":
        """All events as the allocator would have written them: its segments among the blocks that were asked for."""
        begun = [mark for mark in self.repeated if mark < len(self.watch.marks)]
        self.watch.repeated = begun if len(begun) > 1 else []  # if the memory did not run out before
        blocks = self._of_blocks()
        segments, before = self._of_segments()
        born = np.append(np.flatnonzero(blocks["action"] == _ALLOCATED), len(blocks["action"]))
        places = born[before]
        reached = len(self.watch.marks) - 1  # by what comes behind the last block, or before any was handed out
        segments["mark"] = np.append(blocks["mark"], reached)[places]
        found = {}
        for name, column in blocks.items():
            found[name] = self.before[name][:] if self.before is not None else array("q")
            found[name].frombytes(np.insert(column, places, segments[name]).tobytes())
        return found

    def _of_blocks(self) -> dict[str, Any]:
        """Of each block that it was handed out; that it was given back and, at once, taken."""
        kind, first, second = np.array(self.requests, dtype=np.int64).reshape(-1, 3)[: self._made()].T
        allocated, asked = kind == ALLOC, (kind == ALLOC) | (kind == FREE)
        number = np.where(allocated, np.cumsum(allocated) - 1, first)[asked]
        events = np.where(kind[asked] == FREE, 2, 1)
        block = np.repeat(number, events)
        of_two = np.arange(len(block)) - np.repeat(np.cumsum(events) - events, events)
        known, stream = np.unique(second[allocated], return_inverse=True)
        streams = np.array([self.streams[one] for one in known.tolist()], dtype=np.int64)
        return {
            "action": np.where(np.repeat(events, events) == 2, _REQUESTED + of_two, _ALLOCATED),
            "address": np.array(self.addresses, dtype=np.int64)[block],
            "size": first[allocated][block],
            "stream": streams[stream][block],
            "mark": np.repeat((np.cumsum(kind == MARK) - 1)[asked], events) + self.first_mark,
        }

    def _made(self) -> int:
        """How many requests were made: all of them, or those before the one that could not be served."""
        kind = np.array(self.requests[::3], dtype=np.int64)
        not_made = (
            np.flatnonzero(kind == ALLOC)[len(self.addresses) :],
            np.flatnonzero(kind == CONNECT)[self._connected :],
        )
        return min([len(kind), *(int(places[0]) for places in not_made if len(places))])

    def _of_segments(self) -> tuple[dict[str, Any], Any]:
        """What the allocator itself wrote down, and for each of it the block before which that was."""
        events = written.events(self.watch.torch)
        handed_out = np.cumsum([event["action"] == "alloc" for event in events], dtype=int)
        rest = [place for place, event in enumerate(events) if event["action"] not in _BLOCKS]
        before = [int(events[place]["user_metadata"]) for place in rest] if self._left_out else handed_out[rest]
        columns = written.columns_of(written.fields_of([events[place] for place in rest]))
        return {name: np.array(column) for name, column in columns.items()}, np.array(before, dtype=int)


def _leave_out_blocks(torch: Any) -> bool:
    """Begin the allocator's history anew, without blocks where it can be told so (torch 2.11 and later)."""
    record = torch.cuda.memory._record_memory_history
    try:
        record("all", context=None, clear_history=True, skip_actions=list(_BLOCKS))
    except TypeError:
        record("all", context=None, clear_history=True)
        return False
    return True


def _nothing(text: str) -> None:
    """In place of a note where all is written down."""
