"""A recorded step: all allocator events, kernels, copies and collectives of one rank, with phase and module.

A Trace is the result of a run as plain columns, without torch objects.  It is saved as a zip archive of one JSON
document (`trace.json`, the small fields) and one file of raw little-endian numbers for each column.  Reading it never
executes code; a damaged archive raises UnreadableFile.
"""

import json
import struct
import sys
import zipfile
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from tonnage.errors import UnreadableFile
from tonnage.printable import make_printable
from tonnage.recorder.tonnage_recorder.record_layout import (
    ACTIONS,
    EVENT_COLUMNS,
    FORMAT_VERSION,
    KERNEL_KINDS,
    RECORD,
    offset_of,
)
from tonnage.trace import members, operations
from tonnage.trace.operations import StepOperations

_CODES: Final = {kind: code for code, kind in KERNEL_KINDS.items()}

_EXCHANGE: Final = struct.Struct("<IIIII")
_EXCHANGE_BEGIN: Final = offset_of("name")
"""Layout and offset of the part of a record that describes an exchange: name, grid and block."""
_MOST_MEMBER_BYTES: Final = 2 * 2**30


class Event(NamedTuple):
    """One line of the caching allocator's own trace."""

    action: str
    address: int
    size_bytes: int
    """Size that the program requested; blocks are larger (rounding and slack), see `timeline`."""
    stream: int
    mark: int


class Activity(NamedTuple):
    """One record of the ghost's log: work that the program gave to the GPU."""

    kind: str
    name: str
    mark: int
    device: int
    grid: tuple[int, int, int]
    block: int
    stream: int
    bytes: int
    address: int
    address2: int


def pack_activity(activity: Activity, places: Mapping[str, int]) -> bytes:
    """Return the activity as a record of a Trace's log; `places` has the index of each name in `Trace.names`."""
    kind, name, mark, device, grid, block, stream, count, address, address2 = activity
    code, index = _CODES[kind], places[name]
    return RECORD.pack(code, device, 0, mark, index, *grid, block, 0, stream, count, address, address2)


class Mark(NamedTuple):
    """A change of phase or module in the program; events have the index of the latest mark."""

    step: int
    """Number of optimizer steps completed before it."""
    phase: str
    """`load`, `forward`, `backward`, `recompute`, `optimizer` or `other`."""
    module: str
    """Dotted name of the running module; empty for none."""


class Claim(NamedTuple):
    """The category of a block: the block that holds `address` at mark `mark` belongs to `category`."""

    mark: int
    address: int
    category: str
    """`parameter`, `gradient`, `optimizer_state`, `kv_cache` or `communication`."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Trace:
    """All requests of one rank to its GPU during the recorded steps."""

    source: str
    """`ghost`, `meta` or `real`."""
    versions: dict[str, str]
    """Versions of torch, CUDA, transformers and other packages, as the process reported them."""
    device: dict[str, Any]
    """Card as the process saw it: name, total_bytes, context_bytes, capability."""
    rank: int = 0
    """Rank of the recorded process."""
    world_size: int = 1
    """Number of ranks of the job."""
    steps: int = 0
    """Number of completed optimizer steps."""
    allocator_settings: str = ""
    """Value of PYTORCH_ALLOC_CONF in the process."""
    outcome: dict[str, Any] = field(default_factory=dict)
    """`kind`: completed, oom or failed; for the latter two `message`, `stack`, `phase`, `module`."""
    peaks: dict[str, int] = field(default_factory=dict)
    """torch's counters at the end: allocated_bytes, reserved_bytes (peaks), retries, ooms."""
    host: dict[str, int] = field(default_factory=dict)
    """Host memory: peak_bytes (of the steps), its parts pinned_bytes and zero_bytes (never touched); managed_bytes;
    loading_bytes (tensors of the time before); workers_bytes (of processes that this one started)."""
    model: dict[str, Any] = field(default_factory=dict)
    """Facts about the network: parameters, trainable_parameters, class, module (in which the class is defined)."""
    script: dict[str, Any] = field(default_factory=dict)
    """Facts about a dry-run script, as recorded by `tonnage_recorder.script`."""
    assumed: tuple[str, ...] = ()
    """One sentence for each value that a ghost cannot know: the value and the assumption made for it."""
    unknown_calls: dict[str, int] = field(default_factory=dict)
    """Number of calls of each NVIDIA function that the ghost does not implement, by name."""
    unknown_workspaces: dict[str, int] = field(default_factory=dict)
    """Number of workspaces whose size only NVIDIA's libraries know (counted as 0 bytes), by requesting function."""
    seconds: float = 0.0
    """Wall time of the recorded steps on the machine that ran them (host time on a ghost)."""
    marks: tuple[Mark, ...] = ()
    """Phase and module changes in order; events point at them by index."""
    claims: tuple[Claim, ...] = ()
    """Categories of blocks: parameters, gradients, optimizer states."""
    repeated: tuple[int, ...] = ()
    """Mark at which the one executed step begins, then the mark of each repetition of its requests; empty if none."""
    alike: int = 0
    """Number of micro-batches whose requests were copied from an earlier micro-batch instead of executed."""
    layers: tuple[int, ...] = ()
    """For a network of which only a few layers ran: the number of layers in each run, and last the network's own."""
    names: tuple[str, ...] = ()
    """Names of kernels and collectives; the log points at them by index."""
    event_columns: dict[str, "array[int]"] = field(default_factory=dict)
    """Columns action, address, size, stream, mark of the allocator's trace."""
    log: bytes = b""
    """The ghost's log, records of 64 bytes (`struct ghost_record`); empty when not recorded."""
    worked: StepOperations | None = None
    """Operations of one of the steps, where they were counted."""

    def __repr__(self) -> str:
        ranks = f"rank {self.rank} of {self.world_size}"
        ending = self.outcome.get("kind", "unfinished")
        shown = f"<Trace: {self.source}, {ranks}, {self.steps} steps, {self.event_count:,} events, {ending}>"
        return make_printable(shown)

    @property
    def event_count(self) -> int:
        """Return the number of allocator events."""
        return len(self.event_columns.get("action", ()))

    def events(self) -> Iterator[Event]:
        """Yield the allocator's events in order."""
        columns = self.event_columns
        if not columns:
            return
        for action, address, size, stream, mark in zip(*(columns[name] for name in EVENT_COLUMNS), strict=True):
            yield Event(ACTIONS[action], address, size, stream, mark)

    def activities(self, only: str | None = None) -> Iterator[Activity]:
        """Yield the records of the ghost's log in order: kernels, copies, collectives; or only those of one kind."""
        for index in self._record_indices(only):
            record = RECORD.unpack_from(self.log, index * RECORD.size)
            kind, device, _flags, mark, name, x, y, z, block, _shared, stream, count, address, address2 = record
            yield Activity(
                KERNEL_KINDS.get(kind, f"kind {kind}"),
                self._name(name),
                mark,
                device,
                (x, y, z),
                block,
                stream,
                count,
                address,
                address2,
            )

    def exchanges(self) -> list[tuple[str, tuple[int, int, int], int]]:
        """Return the distinct collectives: name, layout (ranks, group, index of this rank in it) and peer."""
        starts = (index * RECORD.size + _EXCHANGE_BEGIN for index in self._record_indices("collective"))
        distinct = map(_EXCHANGE.unpack, dict.fromkeys(self.log[start : start + _EXCHANGE.size] for start in starts))
        return [(self._name(name), (x, y, z), peer) for name, x, y, z, peer in distinct]

    def _name(self, index: int) -> str:
        return self.names[index] if index < len(self.names) else ""

    def _record_indices(self, only: str | None) -> Iterator[int]:
        """Yield the indices of the log's records of this kind, or of all records."""
        kinds = self.log[:: RECORD.size]
        if only is None:
            yield from range(len(kinds))
            return
        wanted = bytes(code for code, kind in KERNEL_KINDS.items() if kind == only)
        index = kinds.find(wanted)
        while index >= 0:
            yield index
            index = kinds.find(wanted, index + 1)


def write(trace: Trace, archive: zipfile.ZipFile, prefix: str = "") -> None:
    """Write a Trace into an open archive, under member names that start with `prefix`."""
    document: dict[str, Any] = {"format_version": FORMAT_VERSION}
    for item in fields(Trace):
        if item.name not in ("marks", "claims", "event_columns", "log", "worked"):
            document[item.name] = getattr(trace, item.name)
    document["marks"] = marks_to_json(trace.marks)
    document["claims"] = [[claim.mark, claim.address, claim.category] for claim in trace.claims]
    archive.writestr(f"{prefix}trace.json", json.dumps(document))
    for name, column in trace.event_columns.items():
        archive.writestr(f"{prefix}events.{name}", _little_endian(column).tobytes())
    archive.writestr(f"{prefix}log", trace.log)
    if trace.worked is not None:
        operations.write(trace.worked, archive, prefix)


def read(archive: zipfile.ZipFile, prefix: str = "") -> Trace:
    """Return the Trace that `write` (or the recorder inside a ghost process) wrote into an archive.

    Raises UnreadableFile when a member is missing, damaged, too large or inconsistent with the others.
    """
    try:
        most = members.document_bytes(archive)
        document = members.read_document(archive, f"{prefix}trace.json", most)
        if document.pop("format_version") != FORMAT_VERSION:
            raise UnreadableFile("The trace was written by another version of tonnage; record it again.")
        columns = {
            name: _parse_column(members.read(archive, f"{prefix}events.{name}", _MOST_MEMBER_BYTES))
            for name in EVENT_COLUMNS
        }
        marks = _marks_from_json(document.pop("marks"))
        claims = _claims_from_json(document.pop("claims"))
        known = {item.name for item in fields(Trace)} - {"worked"}
        plain = {name: value for name, value in document.items() if name in known}
        for name in ("assumed", "names"):
            plain[name] = tuple(str(text) for text in plain.get(name, ()))
        for name in ("repeated", "layers"):
            plain[name] = tuple(int(number) for number in plain.get(name, ()))
        trace = Trace(
            **plain,
            marks=marks,
            claims=claims,
            event_columns=columns,
            log=members.read(archive, f"{prefix}log", _MOST_MEMBER_BYTES),
            worked=operations.read(archive, prefix),
        )
    except (*members.DAMAGED, zipfile.BadZipFile, OSError, EOFError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnreadableFile(f"The trace is damaged ({reason}).") from error
    _check(trace)
    return trace


def load(path: Path, prefix: str = "") -> Trace:
    """Return the Trace in a file.  Raises UnreadableFile."""
    try:
        with zipfile.ZipFile(path) as archive:
            return read(archive, prefix)
    except (OSError, ValueError, KeyError, RuntimeError, zlib.error, struct.error, zipfile.BadZipFile) as error:
        raise UnreadableFile(f"{path} cannot be read as a trace ({error}).") from error


_FIELD_TYPES: Final[Mapping[str, type | tuple[type, ...]]] = {
    **dict.fromkeys(("source", "allocator_settings"), str),
    **dict.fromkeys(("rank", "world_size", "steps", "alike"), int),
    **dict.fromkeys(("versions", "device", "outcome", "peaks", "host", "model", "script"), dict),
    **dict.fromkeys(("unknown_calls", "unknown_workspaces"), dict),
    "seconds": (int, float),
}
"""Types of the fields that are read unconverted."""


def _check(trace: Trace) -> None:
    wrong = [name for name, kind in _FIELD_TYPES.items() if not isinstance(getattr(trace, name), kind)]
    if wrong:
        raise UnreadableFile(f"The trace is damaged: its {wrong[0]} has the wrong type.")
    lengths = {len(column) for column in trace.event_columns.values()}
    if len(lengths) > 1 or len(trace.log) % RECORD.size:
        raise UnreadableFile("The trace is damaged: its columns differ in length.")
    _check_repeated(trace.repeated, len(trace.marks))
    if not trace.event_count:
        return
    least, most = _extremes(trace.event_columns["action"])
    if not 0 <= least <= most < len(ACTIONS):
        raise UnreadableFile("The trace is damaged: it has an unknown event.")
    if _extremes(trace.event_columns["size"])[0] < 0:
        raise UnreadableFile("The trace is damaged: it has an event of negative size.")
    least, most = _extremes(trace.event_columns["mark"])
    if not 0 <= least <= most < max(len(trace.marks), 1):
        raise UnreadableFile("The trace is damaged: an event points at a mark that does not exist.")


def _extremes(column: "array[int]") -> tuple[int, int]:
    """Return the smallest and the largest number of a column that is not empty."""
    import numpy as np  # fifty times faster than a loop; imported here to keep the command line's start fast

    numbers = np.frombuffer(column, dtype=np.int64)
    return int(numbers.min()), int(numbers.max())


def _check_repeated(repeated: tuple[int, ...], marks: int) -> None:
    """Raise UnreadableFile unless the marks are those of a step and at least one repetition, in order."""
    is_ordered = len(repeated) != 1 and list(repeated) == sorted(repeated)
    if not is_ordered or (repeated and not (0 <= repeated[0] and repeated[-1] < marks)):
        raise UnreadableFile("The trace is damaged: its repeated steps begin at marks that do not exist.")


def _parse_column(raw: bytes) -> "array[int]":
    column = array("q")
    column.frombytes(raw)
    return _little_endian(column)


def _little_endian(column: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        column = column[:]
        column.byteswap()
    return column


def marks_to_json(marks: tuple[Mark, ...]) -> dict[str, Any]:
    """Return the marks as JSON values in which each phase and module is written once."""
    phases = sorted({phase for _, phase, _ in marks})
    modules = sorted({module for _, _, module in marks})
    phase_index = {name: index for index, name in enumerate(phases)}
    module_index = {name: index for index, name in enumerate(modules)}
    rows = [[step, phase_index[phase], module_index[module]] for step, phase, module in marks]
    return {"phases": phases, "modules": modules, "rows": rows}


def _marks_from_json(document: dict[str, Any]) -> tuple[Mark, ...]:
    phases, modules = document["phases"], document["modules"]
    step, phase, module = _transpose(document["rows"])
    marks = zip(map(int, step), map(phases.__getitem__, phase), map(modules.__getitem__, module), strict=True)
    return tuple(map(partial(tuple.__new__, Mark), marks))  # does what Mark.__new__ does, without a Python call


def _claims_from_json(rows: list[list[Any]]) -> tuple[Claim, ...]:
    mark, address, category = _transpose(rows)
    claims = zip(map(int, mark), map(int, address), map(str, category), strict=True)
    return tuple(map(partial(tuple.__new__, Claim), claims))


def _transpose(rows: list[list[Any]]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Return the columns of rows of three.  Raises ValueError for rows of another length."""
    first, second, third = zip(*rows, strict=True) if rows else ((), (), ())
    return first, second, third
