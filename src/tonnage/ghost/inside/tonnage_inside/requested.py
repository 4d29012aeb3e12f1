"""Steps without their program: what they ask of the allocator was worked out elsewhere (`tonnage.layers`).

The real allocator is asked for each block, in order, with its size and stream, and gets back what steps give back.
"""

import json
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from . import written

MARK, ALLOC, FREE = range(3)
"""Kinds of requests, as `tonnage.layers.requests` numbers them."""

_BLOCKS = ("alloc", "free_requested", "free_completed")
_ALLOCATED, _REQUESTED = (written.ACTIONS[name] for name in _BLOCKS[:2])


def read(path: str, watch: Any) -> "Requested":
    """The requests in a file: a line of JSON with their marks, then the numbers."""
    header, _, numbers = Path(path).read_bytes().partition(b"\n")
    document = json.loads(header)
    phases, modules = document["phases"], document["modules"]
    requests = array("q")
    requests.frombytes(numbers)
    return Requested(
        watch,
        [(step, phases[phase], modules[module]) for step, phase, module in document["rows"]],
        requests,
        document["repeated"],
    )


class Requested:
    """Requests that are made one by one."""

    def __init__(
        self, watch: Any, marks: list[tuple[int, str, str]], requests: "array[int]", repeated: list[int]
    ) -> None:
        self.watch = watch
        self.marks = marks
        self.requests = requests
        self.repeated = repeated
        self.addresses: list[int] = []
        self.streams = {0: 0}

    def make(self) -> None:
        """Ask for all of them.  Raises torch.OutOfMemoryError where the steps would have."""
        torch, addresses, marks = self.watch.torch, self.addresses, self.marks
        note = torch._C._cuda_setMemoryMetadata
        allocate = torch._C._cuda_cudaCachingAllocator_raw_alloc
        give_back = torch._C._cuda_cudaCachingAllocator_raw_delete
        torch.cuda.init()
        self._leave_out_blocks()
        streams = self.streams
        self.watch.marks.clear()
        begin = self.watch.marks.append
        for kind, first, second in zip(self.requests[::3], self.requests[1::3], self.requests[2::3], strict=True):
            if kind == FREE:
                give_back(addresses[first])
            elif kind == ALLOC:
                if second not in streams:
                    streams[second] = torch.cuda.Stream().cuda_stream
                note(str(len(addresses)))  # a segment that it takes is noted with it
                addresses.append(allocate(first, streams[second]))
            else:
                begin(marks[first])
        self.watch.repeated = self.repeated
        self.watch.steps = self.marks[-1][0] + 1

    def _leave_out_blocks(self) -> None:
        """The allocator need not write down what is known here, where it can be told so (torch 2.11 and later)."""
        record = self.watch.torch.cuda.memory._record_memory_history
        try:
            record("all", context=None, clear_history=True, skip_actions=list(_BLOCKS))
        except TypeError:
            return

    def columns(self) -> dict[str, "array[int]"]:
        """The events as the allocator would have written them: its segments among the blocks that were asked for."""
        blocks = self._of_blocks()
        segments, before = self._of_segments()
        born = np.append(np.flatnonzero(blocks["action"] == _ALLOCATED), len(blocks["action"]))
        places = born[before]
        segments["mark"] = np.append(blocks["mark"], blocks["mark"][-1:])[places]
        return {
            name: array("q", np.insert(column, places, segments[name]).tobytes()) for name, column in blocks.items()
        }

    def _of_blocks(self) -> dict[str, Any]:
        """Of each block that it was handed out; that it was given back and, at once, taken."""
        kind, first, second = np.array(self.requests, dtype=np.int64).reshape(-1, 3)[: self._made()].T
        allocated, asked = kind == ALLOC, kind != MARK
        number = np.where(allocated, np.cumsum(allocated) - 1, first)[asked]
        events = np.where(kind[asked] == FREE, 2, 1)
        block = np.repeat(number, events)
        of_two = np.arange(len(block)) - np.repeat(np.cumsum(events) - events, events)
        streams = np.array(list(self.streams.values()), dtype=np.int64)
        return {
            "action": np.where(np.repeat(events, events) == 2, _REQUESTED + of_two, _ALLOCATED),
            "address": np.array(self.addresses, dtype=np.int64)[block],
            "size": first[allocated][block],
            "stream": streams[second[allocated]][block],
            "mark": np.repeat((np.cumsum(kind == MARK) - 1)[asked], events),
        }

    def _made(self) -> int:
        """How many requests were made: all of them, or those before the one that could not be served."""
        allocations = np.flatnonzero(np.array(self.requests[::3], dtype=np.int64) == ALLOC)
        refused = allocations[len(self.addresses) :]
        return int(refused[0]) if len(refused) else len(self.requests) // 3

    def _of_segments(self) -> tuple[dict[str, Any], Any]:
        """What the allocator itself wrote down, and for each of it the block before which that was."""
        torch = self.watch.torch
        device = torch.cuda.current_device()
        with written.without_collection():
            events = torch.cuda.memory._snapshot(device)["device_traces"][device]
            events = [event for event in events if event["action"] not in _BLOCKS]
        found = {
            "action": [written.ACTIONS[event["action"]] for event in events],
            "address": [event.get("addr", event.get("device_free", 0)) for event in events],
            "size": [event["size"] for event in events],
            "stream": [event["stream"] for event in events],
        }
        before = [int(event["user_metadata"]) for event in events]
        return {name: np.array(column, dtype=np.int64) for name, column in found.items()}, np.array(before, dtype=int)
