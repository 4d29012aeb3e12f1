"""A Trace as a memory snapshot for PyTorch's own viewer (pytorch.org/memory_viz).

A recorded snapshot has the Python call stack of each allocation; this one has the running module, the step and the
phase instead: `model.layers.3.mlp:1:backward`.
"""

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tonnage.allocator import AllocatorSettings
from tonnage.allocator.replay import follow
from tonnage.allocator.snapshot import DeviceMemory, Frame, Snapshot, Stack, to_plain
from tonnage.errors import CannotEstimate, UsageError
from tonnage.files import open_replacing
from tonnage.trace.trace import Event, Mark, Trace

_PROTOCOL: Final = 4  # the newest pickle protocol that the viewer reads


def snapshot(trace: Trace) -> Snapshot:
    """Return the state of the rank's allocator at the end of the recording, with all its events.

    Raises CannotEstimate when the Trace contradicts itself, or has unknown allocator settings.
    """
    events = tuple(trace.events())
    if any(event.address < 0 or event.size_bytes < 0 for event in events):
        raise CannotEstimate("The trace is damaged: it has a negative address or size.")
    total = sum(event.size_bytes for event in events if event.action in ("segment_alloc", "segment_map"))
    try:
        allocator = follow(events, AllocatorSettings.parse(trace.allocator_settings), max(total, 1))
    except (ValueError, KeyError, UsageError) as error:
        raise CannotEstimate(f"The trace contradicts itself, so no snapshot can be made of it ({error}).") from error
    memory = DeviceMemory(
        segments=allocator.segments(),
        events=events,
        stacks=tuple(_stack(mark) for mark in trace.marks) or ((),),
        block_stacks=_marks_of_live_blocks(events),
    )
    settings = {"PYTORCH_CUDA_ALLOC_CONF": trace.allocator_settings}
    return Snapshot(devices=(memory,), settings=settings)


def write(trace: Trace, path: Path) -> None:
    """Write the snapshot of a Trace into a file, whole or not at all.  Raises UnwritableFile and CannotEstimate."""
    plain = to_plain(snapshot(trace))
    with open_replacing(path) as file:
        pickle.dump(plain, file, protocol=_PROTOCOL)


def _stack(mark: Mark) -> Stack:
    """Return a mark as a call stack of one line; the line number is the step, from 1."""
    return (Frame(filename=mark.module or "(no module)", line=mark.step + 1, name=mark.phase),)


def _marks_of_live_blocks(events: Iterable[Event]) -> dict[int, int]:
    """Return the mark of the allocation of each block that was never freed, by address."""
    marks: dict[int, int] = {}
    for event in events:
        if event.action == "alloc":
            marks[event.address] = event.mark
        elif event.action == "free_completed":
            marks.pop(event.address, None)
    return marks
