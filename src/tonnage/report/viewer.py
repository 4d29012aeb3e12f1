"""A Trace as a memory snapshot for PyTorch's own viewer (pytorch.org/memory_viz).

A recorded snapshot has the Python call stack of each allocation; this one has the running module, the step and the
phase instead: `model.layers.3.mlp:1:backward`.  Millions of events stay columns on the way into the file: a Python
object for each would take a hundred times the memory.
"""

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from tonnage.allocator import AllocatorSettings
from tonnage.allocator.segments import Segment
from tonnage.allocator.snapshot import DeviceMemory, Frame, Snapshot, to_plain
from tonnage.errors import CannotEstimate, UsageError
from tonnage.estimates.block_events import OOM, Events
from tonnage.estimates.final_state import final_segments
from tonnage.files import open_replacing
from tonnage.recorder.tonnage_recorder.record_layout import ACTIONS
from tonnage.trace.trace import Mark, Trace

_EVENTS_AT_ONCE: Final = 2**16

_MEMOIZED: Final = "<u4"
_PUT: Final = b"r"
"""Pickle's instruction that keeps what was built under a number."""
_GET: Final = b"j"
"""The instruction that takes it again."""
_LONG: Final = b"\x8a\x08"
"""The instruction for an integer of 8 bytes."""

_KEYS: Final = ("action", "addr", "size", "stream", "time_us", "frames", "device_free")
"""Keys of an event; the last one stands for `addr` where memory ran out."""


def write(trace: Trace, path: Path) -> None:
    """Write the snapshot of a Trace into a file, whole or not at all: its allocator at the end, and all its events.

    Raises UnwritableFile, and CannotEstimate when the Trace contradicts itself, or has unknown allocator settings.
    """
    events = Events.of(trace)
    stacks, stack_of_mark = _find_stacks(trace.marks)
    try:
        settings = AllocatorSettings.parse(trace.allocator_settings)
        segments, marks = final_segments(events, trace.event_columns, settings)
    except (ValueError, KeyError, UsageError) as error:
        raise CannotEstimate(f"The trace contradicts itself, so no snapshot can be made of it ({error}).") from error
    block_stacks = {address: int(stack_of_mark[mark]) for address, mark in marks.items()}
    document = _document(trace, segments, block_stacks, stacks)
    with open_replacing(path) as file:
        _write_pickle(file, document, stacks, trace, stack_of_mark)


def _find_stacks(marks: tuple[Mark, ...]) -> "tuple[list[list[dict[str, Any]]], np.ndarray[Any, Any]]":
    """Return each distinct mark as a call stack of one line, and the index of each mark's; steps count from 1."""
    indices: dict[Mark, int] = {}
    index_of_mark = np.array([indices.setdefault(mark, len(indices)) for mark in marks] or [0], dtype=np.int64)
    frames = (Frame(filename=mark.module or "(no module)", line=mark.step + 1, name=mark.phase) for mark in indices)
    return [[frame._asdict()] for frame in frames] or [[]], index_of_mark


def _document(
    trace: Trace, segments: tuple[Segment, ...], block_stacks: dict[int, int], stacks: list[list[dict[str, Any]]]
) -> dict[str, Any]:
    """Return the document of the viewer without the events."""
    frames = tuple(tuple(Frame(**frame) for frame in stack) for stack in stacks)
    memory = DeviceMemory(segments=segments, stacks=frames, block_stacks=block_stacks)
    plain = to_plain(Snapshot(devices=(memory,), settings={"PYTORCH_CUDA_ALLOC_CONF": trace.allocator_settings}))
    del plain["device_traces"]
    return plain


def _write_pickle(
    file: IO[bytes],
    document: dict[str, Any],
    stacks: list[list[dict[str, Any]]],
    trace: Trace,
    stack_of_mark: "np.ndarray[Any, Any]",
) -> None:
    """Write the document with its events.

    What events share is built once and taken again by its number, so that all events have the same number of bytes:
    the keys, the names of the actions, the stacks.  The entry `shared` builds it.
    """
    file.write(b"\x80\x04}(")
    for name, value in document.items():
        file.write(_pickled(name) + _pickled(value))
    shared = (*_KEYS, *ACTIONS, *stacks)
    file.write(_pickled("shared") + b"](")
    for number, value in enumerate(shared):
        file.write(_pickled(value) + _PUT + number.to_bytes(4, "little"))
    file.write(b"e" + _pickled("device_traces") + b"](](")
    for records in _event_records(trace, stack_of_mark):
        file.write(records)
    file.write(b"eeu.")


def _event_records(trace: Trace, stack_of_mark: "np.ndarray[Any, Any]") -> Iterator[bytes]:
    """Yield the instructions that build the events, some thousand at once."""
    columns = {name: np.asarray(column, dtype=np.int64) for name, column in trace.event_columns.items()}
    layout: list[tuple[str, str]] = []
    constants: dict[str, bytes] = {}

    def constant(text: bytes) -> None:
        constants[f"constant{len(layout)}"] = text
        layout.append((f"constant{len(layout)}", f"V{len(text)}"))

    for index, name in enumerate(_KEYS[:6]):
        constant(b"}(" + _GET if index == 0 else _GET)
        layout.append((f"key of {name}", _MEMOIZED))
        constant(_GET if name in ("action", "frames") else _LONG)
        layout.append((name, _MEMOIZED if name in ("action", "frames") else "<i8"))
    constant(b"u")
    for first in range(0, trace.event_count, _EVENTS_AT_ONCE):
        part = {name: column[first : first + _EVENTS_AT_ONCE] for name, column in columns.items()}
        count = len(part["action"])
        records = np.zeros(count, dtype=np.dtype(layout))
        for name, text in constants.items():
            records[name] = np.void(text)
        for index, name in enumerate(_KEYS[:6]):
            records[f"key of {name}"] = index
        records["key of addr"] = np.where(part["action"] == OOM, len(_KEYS) - 1, _KEYS.index("addr"))
        records["action"] = len(_KEYS) + part["action"]
        records["addr"], records["size"], records["stream"] = part["address"], part["size"], part["stream"]
        records["time_us"] = np.arange(first, first + count)
        records["frames"] = len(_KEYS) + len(ACTIONS) + stack_of_mark[part["mark"]]
        yield records.tobytes()


def _pickled(value: Any) -> bytes:
    """Return the instructions that build a plain value, without numbers for its parts."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=3)  # without frames
    pickler.fast = True
    pickler.dump(value)
    return buffer.getvalue()[2:-1]
