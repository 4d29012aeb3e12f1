"""The caching allocator's own account of what it did, made small and comparable between machines."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import torch

from tonnage.recorder.tonnage_recorder.record_layout import ACTIONS


def start() -> None:
    """Begin to record every event, without stacks."""
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=10**7)


def recorded() -> list[dict[str, Any]]:
    """All events of the first GPU so far, in order."""
    events: list[dict[str, Any]] = torch.cuda.memory._snapshot(0)["device_traces"][0]
    return events


def sizes(events: list[dict[str, Any]]) -> list[int]:
    """Requests as positive, frees as negative numbers of bytes, in order."""
    sign = {"alloc": 1, "free_completed": -1}
    return [sign[event["action"]] * event["size"] for event in events if event["action"] in sign]


def columns(events: list[dict[str, Any]]) -> dict[str, list[int]]:
    """The events as columns; an address becomes a segment (numbered as they are first seen) and an offset in it.

    Expandable segments have one range of addresses each: its number is that of the lowest page mapped so far, so
    adjoining pages get the number of the page before them.
    """
    segments = _Segments()
    streams: dict[int, int] = {}
    written: dict[str, list[int]] = {key: [] for key in ("action", "bytes", "stream", "segment", "offset")}
    for event in events:
        action = event["action"]
        address = event.get("addr", 0)
        if action in ("segment_alloc", "segment_map"):
            segments.add(address, event["size"], adjoin=action == "segment_map")
        segment, offset = segments.place(address)
        written["action"].append(ACTIONS.index(action))
        written["bytes"].append(event["size"])
        written["stream"].append(streams.setdefault(event.get("stream", 0), len(streams)))
        written["segment"].append(segment)
        written["offset"].append(offset)
    return written


class _Segments:
    """Which address belongs to which segment, as segments come; a later one hides an earlier at its place."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._place: dict[int, tuple[int, int, int]] = {}
        self._count = 0

    def add(self, address: int, size_bytes: int, *, adjoin: bool) -> None:
        before = self._before(address)
        if before is not None and adjoin:
            start, end, number = before
            if end == address:
                self._place[start] = (start, address + size_bytes, number)
                return
        for start in [s for s in self._starts if address <= s < address + size_bytes]:
            self._starts.remove(start)
            del self._place[start]
        self._starts.insert(bisect_right(self._starts, address), address)
        self._place[address] = (address, address + size_bytes, self._count)
        self._count += 1

    def place(self, address: int) -> tuple[int, int]:
        """Number of the segment and offset in it; (-1, 0) for an address in none."""
        before = self._before(address)
        if before is None or address >= before[1]:
            return -1, 0
        return before[2], address - before[0]

    def _before(self, address: int) -> tuple[int, int, int] | None:
        position = bisect_right(self._starts, address)
        return self._place[self._starts[position - 1]] if position else None
