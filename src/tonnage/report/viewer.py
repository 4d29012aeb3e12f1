"""A Trace as a memory snapshot, for PyTorch's own viewer (pytorch.org/memory_viz).

Where a recorded snapshot has the Python call stack of an allocation, this one has the module that was running, the
phase and the step: `model.layers.3.mlp:1:backward`.
"""

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tonnage.allocator import AllocatorSettings
from tonnage.allocator.replay import follow
from tonnage.allocator.snapshot import DeviceMemory, Frame, Snapshot, Stack, to_plain
from tonnage.errors import CannotEstimate, UsageError
from tonnage.files import replacing
from tonnage.trace.trace import Event, Mark, Trace

_PROTOCOL: Final = 4  # the newest that the viewer reads


def snapshot(trace: Trace) -> Snapshot:
    """What the rank's allocator held when the recording ended, and everything it did before.

    Raises CannotEstimate when the Trace contradicts itself, or has allocator settings that are not known.
    """
    events = tuple(trace.events())
    if any(event.address < 0 or event.size_bytes < 0 for event in events):
        raise CannotEstimate("The trace is damaged: it holds a negative address or size.")
    total = sum(event.size_bytes for event in events if event.action in ("segment_alloc", "segment_map"))
    try:
        allocator = follow(events, AllocatorSettings.parse(trace.allocator_settings), max(total, 1))
    except (ValueError, KeyError, UsageError) as error:
        raise CannotEstimate(f"The trace contradicts itself, so no snapshot can be made of it ({error}).") from error
    memory = DeviceMemory(
        segments=allocator.segments(),
        events=events,
        stacks=tuple(_stack(mark) for mark in trace.marks) or ((),),
        block_stacks=_holders(events),
    )
    settings = {"PYTORCH_CUDA_ALLOC_CONF": trace.allocator_settings}
    return Snapshot(devices=(memory,), settings=settings)


def write(trace: Trace, path: Path) -> None:
    """Put the snapshot of a Trace into a file, whole or not at all.  Raises UnwritableFile, and as `snapshot`."""
    plain = to_plain(snapshot(trace))
    with replacing(path) as file:
        pickle.dump(plain, file, protocol=_PROTOCOL)


def _stack(mark: Mark) -> Stack:
    """The place of a step as one line of a call stack; the line number is the step, from 1."""
    return (Frame(filename=mark.module or "(no module)", line=mark.step + 1, name=mark.phase),)


def _holders(events: Iterable[Event]) -> dict[int, int]:
    """Address of each block that was never given back: the mark under which it was handed out."""
    holders: dict[int, int] = {}
    for event in events:
        if event.action == "alloc":
            holders[event.address] = event.mark
        elif event.action == "free_completed":
            holders.pop(event.address, None)
    return holders
