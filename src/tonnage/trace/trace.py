"""A step written down: every allocator event, kernel, copy and collective of one rank, with phase and module.

A Trace is what remains of a run: plain columns, no torch objects.  It is saved as a zip archive of one JSON
document (`trace.json`, the small fields) and one file of raw little-endian numbers per column.  Reading it never
executes anything; a damaged archive raises UnreadableFile.
"""

import json
import struct
import sys
import zipfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from tonnage.errors import UnreadableFile
from tonnage.trace import operations as works
from tonnage.trace.operations import Worked

FORMAT_VERSION: Final = 1

ACTIONS: Final = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
    "snapshot",
    "workspace_snapshot",
)
"""The names of the allocator's trace events, in the order of their codes in a Trace."""

KERNEL_KINDS: Final = {
    1: "kernel",
    2: "copy_h2d",
    3: "copy_d2h",
    4: "copy_d2d",
    5: "memset",
    6: "malloc",
    7: "free",
    8: "vm_map",
    9: "vm_unmap",
    10: "pinned_alloc",
    11: "pinned_free",
    12: "collective",
    13: "library",
    14: "event_record",
    15: "stream_wait",
    16: "synchronise",
    17: "graph_launch",
    18: "host_function",
}
"""What a record of the ghost's log says happened (`struct ghost_record`, field kind)."""

_CODES: Final = {kind: code for code, kind in KERNEL_KINDS.items()}

EVENT_COLUMNS: Final = ("action", "address", "size", "stream", "mark")
"""The columns of the allocator's trace, each 64-bit signed integers."""

_RECORD: Final = struct.Struct("<BBHIIIIIIIQQQQ")  # struct ghost_record, 64 bytes
_EXCHANGE: Final = struct.Struct("<IIIII")
_EXCHANGE_BEGIN: Final = 8
"""What a record says of the kind of exchange that it was (name, grid and block), and where."""
_MAX_MEMBER_BYTES: Final = 2 * 2**30


class Event(NamedTuple):
    """One line of the caching allocator's own trace."""

    action: str
    address: int
    size_bytes: int
    """As requested by the program; blocks are larger (rounding and slack), see `timeline`."""
    stream: int
    mark: int


class Activity(NamedTuple):
    """One record of the ghost's log: something the program asked the GPU to do."""

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


def packed(activity: Activity, places: Mapping[str, int]) -> bytes:
    """The activity as a record of a Trace's log, which knows names by their places in a list."""
    kind, name, mark, device, grid, block, stream, count, address, address2 = activity
    code, place = _CODES[kind], places[name]
    return _RECORD.pack(code, device, 0, mark, place, *grid, block, 0, stream, count, address, address2)


class Mark(NamedTuple):
    """A moment at which the program entered or left a phase or a module; events carry the latest mark's number."""

    step: int
    """Optimizer steps completed before this moment."""
    phase: str
    """`load`, `forward`, `backward`, `recompute`, `optimizer` or `other`."""
    module: str
    """Dotted name of the module that is running; empty for none."""


class Claim(NamedTuple):
    """Knowledge about a block: the block that holds `address` at mark `mark` belongs to `category`."""

    mark: int
    address: int
    category: str
    """`parameter`, `gradient`, `optimizer_state` or `communication`."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Everything that one rank asked of its GPU during the recorded steps."""

    source: str
    """`ghost`, `meta` or `real`."""
    versions: dict[str, str]
    """Of torch, CUDA, transformers and the like, as the process itself reported them."""
    device: dict[str, Any]
    """The card as the process saw it: name, total_bytes, context_bytes, capability."""
    rank: int = 0
    """Which rank of the job this is."""
    world_size: int = 1
    """How many ranks the job has."""
    steps: int = 0
    """Optimizer steps that were completed."""
    allocator_settings: str = ""
    """PYTORCH_ALLOC_CONF as the process had it."""
    outcome: dict[str, Any] = field(default_factory=dict)
    """`kind`: completed, oom or failed; for the latter two `message`, `stack`, `phase`, `module`."""
    peaks: dict[str, int] = field(default_factory=dict)
    """torch's own counters at the end: allocated_bytes, reserved_bytes (peaks), retries, ooms."""
    host: dict[str, int] = field(default_factory=dict)
    """peak_bytes (the most that the job needs), of it pinned_bytes and zero_bytes (never touched); managed_bytes."""
    model: dict[str, Any] = field(default_factory=dict)
    """What is known of the network: parameters, trainable_parameters, class, module (that the class is from)."""
    script: dict[str, Any] = field(default_factory=dict)
    """What a script that was dry-run said of itself: `tonnage_inside.script`."""
    assumed: tuple[str, ...] = ()
    """Values that a ghost cannot know and what was taken instead, one sentence each."""
    unknown_calls: dict[str, int] = field(default_factory=dict)
    """Calls of NVIDIA functions that the ghost does not implement: name to count."""
    unknown_workspaces: dict[str, int] = field(default_factory=dict)
    """Workspaces whose size only NVIDIA's libraries know and that count 0 bytes: who asked, to count."""
    seconds: float = 0.0
    """Wall time of the recorded steps on the machine that ran them (host time on a ghost)."""
    marks: tuple[Mark, ...] = ()
    """Phase and module changes, in order; events point at them by index."""
    claims: tuple[Claim, ...] = ()
    """Which blocks are parameters, gradients, optimizer states."""
    repeated: tuple[int, ...] = ()
    """Marks at which the only step begins that was made, and each repetition of its requests that follows it."""
    alike: int = 0
    """Micro-batches that were asked for without their program: they ask for what one before them asked for."""
    layers: tuple[int, ...] = ()
    """Of a network of which only a few layers were run: how many in each run, and at the end how many it has."""
    names: tuple[str, ...] = ()
    """Names of kernels and collectives; the log points at them by index."""
    event_columns: dict[str, "array[int]"] = field(default_factory=dict)
    """Columns action, address, size, stream, mark of the allocator's trace."""
    log: bytes = b""
    """The ghost's log, records of 64 bytes (`struct ghost_record`); empty when not recorded."""
    worked: Worked | None = None
    """What the operations of one of the steps work, where that was counted."""

    @property
    def event_count(self) -> int:
        """Number of allocator events."""
        return len(self.event_columns.get("action", ()))

    def events(self) -> Iterator[Event]:
        """The allocator's events in order."""
        columns = self.event_columns
        if not columns:
            return
        for action, address, size, stream, mark in zip(*(columns[name] for name in EVENT_COLUMNS), strict=True):
            yield Event(ACTIONS[action], address, size, stream, mark)

    def activities(self, only: str | None = None) -> Iterator[Activity]:
        """The ghost's log in order: kernels, copies, collectives; or those of one kind of KERNEL_KINDS alone."""
        for place in self._places(only):
            record = _RECORD.unpack_from(self.log, place * _RECORD.size)
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
        """The collectives, those that are alike once: name, layout (ranks, group, this rank in it) and peer."""
        starts = (place * _RECORD.size + _EXCHANGE_BEGIN for place in self._places("collective"))
        found = map(_EXCHANGE.unpack, dict.fromkeys(self.log[start : start + _EXCHANGE.size] for start in starts))
        return [(self._name(name), (x, y, z), peer) for name, x, y, z, peer in found]

    def _name(self, place: int) -> str:
        return self.names[place] if place < len(self.names) else ""

    def _places(self, only: str | None) -> Iterator[int]:
        """Which records of the log are of this kind, or all."""
        kinds = self.log[:: _RECORD.size]
        if only is None:
            yield from range(len(kinds))
            return
        wanted = bytes(code for code, kind in KERNEL_KINDS.items() if kind == only)
        place = kinds.find(wanted)
        while place >= 0:
            yield place
            place = kinds.find(wanted, place + 1)


def write(trace: Trace, archive: zipfile.ZipFile, prefix: str = "") -> None:
    """Put a Trace into an open archive, its members' names starting with `prefix`."""
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
        works.write(trace.worked, archive, prefix)


def read(archive: zipfile.ZipFile, prefix: str = "") -> Trace:
    """The Trace that `write` (or the recorder inside a ghost process) put into an archive.

    Raises UnreadableFile when a member is missing, damaged, of absurd size or does not fit the others.
    """
    try:
        document = json.loads(_member(archive, f"{prefix}trace.json"))
        if document.pop("format_version") != FORMAT_VERSION:
            raise UnreadableFile("The trace was written by another version of tonnage; record it again.")
        columns = {name: _column(_member(archive, f"{prefix}events.{name}")) for name in EVENT_COLUMNS}
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
            log=_member(archive, f"{prefix}log"),
            worked=works.read(archive, prefix),
        )
    except (KeyError, TypeError, ValueError, AttributeError, zipfile.BadZipFile, OSError, EOFError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnreadableFile(f"The trace is damaged ({reason}).") from error
    _check(trace)
    return trace


def load(path: Path, prefix: str = "") -> Trace:
    """The Trace in a file.  Raises UnreadableFile."""
    try:
        with zipfile.ZipFile(path) as archive:
            return read(archive, prefix)
    except (OSError, zipfile.BadZipFile) as error:
        raise UnreadableFile(f"{path} cannot be read as a trace ({error}).") from error


_PLAIN: Final[Mapping[str, type | tuple[type, ...]]] = {
    **dict.fromkeys(("source", "allocator_settings"), str),
    **dict.fromkeys(("rank", "world_size", "steps", "alike"), int),
    **dict.fromkeys(("versions", "device", "outcome", "peaks", "host", "model", "script"), dict),
    **dict.fromkeys(("unknown_calls", "unknown_workspaces"), dict),
    "seconds": (int, float),
}
"""Fields that are taken as they are written."""


def _check(trace: Trace) -> None:
    wrong = [name for name, kind in _PLAIN.items() if not isinstance(getattr(trace, name), kind)]
    if wrong:
        raise UnreadableFile(f"The trace is damaged: its {wrong[0]} is of another type than a trace's.")
    lengths = {len(column) for column in trace.event_columns.values()}
    if len(lengths) > 1 or len(trace.log) % _RECORD.size:
        raise UnreadableFile("The trace is damaged: its columns differ in length.")
    _check_repeated(trace.repeated, len(trace.marks))
    if not trace.event_count:
        return
    least, most = _extremes(trace.event_columns["action"])
    if not 0 <= least <= most < len(ACTIONS):
        raise UnreadableFile("The trace is damaged: it holds an unknown event.")
    if _extremes(trace.event_columns["size"])[0] < 0:
        raise UnreadableFile("The trace is damaged: it holds an event of negative size.")
    least, most = _extremes(trace.event_columns["mark"])
    if not 0 <= least <= most < max(len(trace.marks), 1):
        raise UnreadableFile("The trace is damaged: an event points at a mark that is not there.")


def _extremes(column: "array[int]") -> tuple[int, int]:
    """The least and the greatest number of a column that has some."""
    import numpy as np  # fifty times as fast as going through them, and late, as reading the command line needs none

    numbers = np.frombuffer(column, dtype=np.int64)
    return int(numbers.min()), int(numbers.max())


def _check_repeated(repeated: tuple[int, ...], marks: int) -> None:
    """A step and at least one repetition, one behind the other."""
    ordered = len(repeated) != 1 and list(repeated) == sorted(repeated)
    if not ordered or (repeated and not (0 <= repeated[0] and repeated[-1] < marks)):
        raise UnreadableFile("The trace is damaged: steps that are repeated begin at marks that are not there.")


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    size = archive.getinfo(name).file_size
    if size > _MAX_MEMBER_BYTES:
        raise UnreadableFile(f"The trace's part {name} claims {size} bytes; the limit is {_MAX_MEMBER_BYTES}.")
    return archive.read(name)


def _column(raw: bytes) -> "array[int]":
    column = array("q")
    column.frombytes(raw)
    return _little_endian(column)


def _little_endian(column: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        column = column[:]
        column.byteswap()
    return column


def marks_to_json(marks: tuple[Mark, ...]) -> dict[str, Any]:
    """Marks with phases and modules written once."""
    phases = sorted({phase for _, phase, _ in marks})
    modules = sorted({module for _, _, module in marks})
    phase_index = {name: index for index, name in enumerate(phases)}
    module_index = {name: index for index, name in enumerate(modules)}
    rows = [[step, phase_index[phase], module_index[module]] for step, phase, module in marks]
    return {"phases": phases, "modules": modules, "rows": rows}


def _marks_from_json(document: dict[str, Any]) -> tuple[Mark, ...]:
    phases, modules = document["phases"], document["modules"]
    step, phase, module = _transposed(document["rows"])
    marks = zip(map(int, step), map(phases.__getitem__, phase), map(modules.__getitem__, module), strict=True)
    return tuple(map(partial(tuple.__new__, Mark), marks))  # as Mark's own, which is a function in Python, does it


def _claims_from_json(rows: list[list[Any]]) -> tuple[Claim, ...]:
    mark, address, category = _transposed(rows)
    claims = zip(map(int, mark), map(int, address), map(str, category), strict=True)
    return tuple(map(partial(tuple.__new__, Claim), claims))


def _transposed(rows: list[list[Any]]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """The columns of rows of three.  Raises ValueError for others."""
    first, second, third = zip(*rows, strict=True) if rows else ((), (), ())
    return first, second, third
