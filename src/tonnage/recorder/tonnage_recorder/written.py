"""Writes the watch's observations into one file, in the format that `tonnage.trace.trace` reads."""

import contextlib
import gc
import json
import os
import sys
import time
import zipfile
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, chain, groupby, repeat
from operator import itemgetter
from typing import Any, NamedTuple

from . import host, ranks
from .allocator_guard import read_peaks
from .record_layout import ACTIONS, FORMAT_VERSION

CODES = {name: code for code, name in enumerate(ACTIONS)}

_FREE_COMPLETED, _OOM = CODES["free_completed"], CODES["oom"]

CONTEXT_BYTES = int(os.environ.get("GHOST_CONTEXT_BYTES", "0"))
"""Memory of the CUDA context, read before the program changes its environment."""


def write(
    path: str,
    watch: Any,
    outcome: dict[str, Any],
    assumed: list[str],
    source: str,
    columns: "dict[str, array[int]] | None" = None,
    libraries: "Collection[str] | None" = None,
) -> None:
    """Collect everything and write it to `path`, where the file appears only when it is complete.

    `columns` are the events if they are known; else they are read from the allocator.  `libraries` are those whose
    versions are written; default: all that are imported.
    """
    seconds = time.perf_counter() - watch.began
    watch.finish()
    torch, native = watch.torch, watch.native
    device = fullest(torch)
    pinned = (native.pinned_peak_bytes(), native.managed_peak_bytes()) if native is not None else (0, 0)
    on_host = host.read_peaks(*pinned)  # before the events are collected, which may take more than the job
    columns = columns or event_columns(torch, watch, device)
    claims = list(watch.claims)  # before the marks that they point at: the program may still be running
    rank, world_size = place(torch)
    document = {
        "format_version": FORMAT_VERSION,
        "source": source,
        "versions": versions(torch, libraries),
        "device": device_facts(torch, device, native),
        "rank": rank,
        "world_size": world_size,
        "steps": watch.steps,
        "allocator_settings": allocator_settings(torch.__version__),
        "outcome": outcome or {"kind": "completed"},
        "peaks": read_peaks(torch, device),
        "host": on_host,
        "model": watch.model,
        "script": {} if watch.script is None else watch.script.facts,
        "assumed": assumed,
        "unknown_calls": native.unknown_calls() if native is not None else {},
        "unknown_workspaces": native.unknown_workspaces() if native is not None else {},
        "seconds": seconds,
        "names": native.names() if native is not None else [],
        "marks": marks_document(list(watch.marks)),
        "claims": claims,
        "repeated": watch.repeated,
        "alike": watch.alike,
    }
    partial = f"{path}.partial"
    with zipfile.ZipFile(partial, "w") as archive:
        archive.writestr("trace.json", json.dumps(document))
        for name, column in columns.items():
            archive.writestr(f"events.{name}", column.tobytes())
        archive.writestr("log", native.log_bytes() if native is not None else b"")
    os.replace(partial, path)


def fullest(torch: Any) -> int:
    """Return the device that ran out of memory, or else the one on which this process reserved most."""
    counters = {device: read_peaks(torch, device) for device in range(torch.cuda.device_count())}
    return max(counters, key=lambda device: (counters[device]["ooms"], counters[device]["reserved_bytes"], -device))


def event_columns(torch: Any, watch: Any, device: int | None = None) -> dict[str, "array[int]"]:
    """Return the allocator's trace of one device as columns; each event carries the latest mark before it.

    Events that were read before (`watch.early_events`) come first.
    """
    with without_collection():
        watch.event_history = events(torch, device)
        traced = fields_of(watch.event_history)
        columns = {**columns_of(traced), "mark": event_marks(traced, watch)}
    if not watch.early_events:
        return columns
    return {name: watch.early_events[name] + column for name, column in columns.items()}


def events(torch: Any, device: int | None = None) -> list[dict[str, Any]]:
    """Return the allocator's events of a device, by default the current one."""
    device = torch.cuda.current_device() if device is None else device
    history: list[dict[str, Any]] = torch.cuda.memory._snapshot(device)["device_traces"][device]
    return history


class Fields(NamedTuple):
    """The facts that are read from events, one column each."""

    action: bytes
    """Codes of actions."""
    address: Sequence[int]
    """Address; 0 if an event has none."""
    size: Sequence[int]
    """Bytes."""
    stream: Sequence[int]
    """Stream that asked for the memory."""
    note: Sequence[str | None]
    """Mark that the watch had announced, as text."""


def fields_of(traced: list[dict[str, Any]]) -> Fields:
    """Return the columns of events, read in one pass because events are scattered over the memory."""
    try:
        values = list(chain.from_iterable(map(_READ, traced)))
    except KeyError:  # running out of memory is at no address, and old allocators take no notes
        values = list(chain.from_iterable(map(_read_with_defaults, traced)))
    action, address, size, stream, note = (
        values[index :: len(Fields._fields)] for index in range(len(Fields._fields))
    )
    return Fields(bytes(map(CODES.__getitem__, action)), address, size, stream, note)


_READ = itemgetter("action", "addr", "size", "stream", "user_metadata")
"""Reads the values of `Fields` from an event that has all of them."""


def _read_with_defaults(event: dict[str, Any]) -> tuple[Any, ...]:
    address = event.get("addr", event.get("device_free", 0))
    return event["action"], address, event.get("size", 0), event.get("stream", 0), event.get("user_metadata")


def columns_of(traced: Fields) -> dict[str, "array[int]"]:
    """Return events as columns, all but their marks."""
    columns = {"action": traced.action, "address": traced.address, "size": traced.size, "stream": traced.stream}
    return {name: array("q", list(column)) for name, column in columns.items()}


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Turn off Python's cyclic collector, which would visit all modules again and again as objects pile up."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def event_marks(traced: Fields, watch: Any) -> "array[int]":
    """Return the mark of each event.

    The allocator notes the mark that its thread last announced.  Marks only grow, so the highest mark seen so far
    replaces that of a thread that has announced nothing lately.  Where the watch counted the blocks handed out or
    taken back before a mark (at all marks before torch 2.10, whose allocator takes no notes), the same count here
    finds the mark.  A segment belongs to the block that it is for, which comes next unless memory runs out.
    """
    latest = done = 0
    marks = array("q")
    counted = _counted(traced.action, watch.positions, watch.oom_marks, watch.early_block_count)
    for index, mark in sorted([*_noted(traced.note), *counted]):
        if mark > latest:
            marks.extend(repeat(latest, index - done))
            latest, done = mark, index
    marks.extend(repeat(latest, len(traced.action) - done))
    return marks


def _noted(notes: Sequence[str | None]) -> Iterator[tuple[int, int]]:
    """Yield the index of the first event of each run of events with the same noted mark, and that mark."""
    index = 0
    for text, alike in groupby(notes):
        if text and text.isdigit():
            yield index, int(text)
        index += len(list(alike))


_HANDED = bytes(name in ("alloc", "free_requested") for name in ACTIONS).ljust(256, b"\0")
"""One byte for the code of each action: 1 if it hands out or takes back a block."""


def _counted(
    actions: bytes, positions: Mapping[int, int], oom_marks: Sequence[int], before: int
) -> Iterator[tuple[int, int]]:
    """Yield the index of the event at which each counted mark begins, and that mark.

    `positions` has the number of blocks handed out or taken back before a mark; `before` of them came before these
    events.
    """
    seen = list(accumulate(actions.translate(_HANDED), initial=before))
    ooms = [place for place, action in enumerate(actions) if action == _OOM] if oom_marks else []
    place = 0
    for mark, count in positions.items():
        place = max(place, bisect_left(seen, count))
        refused = bisect_left(oom_marks, mark)  # so often memory had run out when it began
        if refused > len(ooms):
            return
        if refused:
            place = max(place, ooms[refused - 1] + 1)
        while place < len(actions) and actions[place] == _FREE_COMPLETED:
            place += 1
        if place >= len(actions):
            return
        yield place, mark


def marks_document(marks: list[tuple[int, str, str]]) -> dict[str, Any]:
    """Return marks as JSON, with each phase and module written once."""
    phases = {name: index for index, name in enumerate(dict.fromkeys(phase for _, phase, _ in marks))}
    modules = {name: index for index, name in enumerate(dict.fromkeys(module for _, _, module in marks))}
    rows = [[step, phases[phase], modules[module]] for step, phase, module in marks]
    return {"phases": list(phases), "modules": list(modules), "rows": rows}


def allocator_settings(version: str) -> str:
    """Return the allocator's options from the environment, by the names that this version of torch reads."""
    old = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    knows_new = tuple(int(number) for number in version.split(".")[:2]) >= (2, 10)  # 2.9 has it and passes it by
    return (os.environ.get("PYTORCH_ALLOC_CONF") if knows_new else None) or old


LIBRARIES = (
    *("transformers", "accelerate", "peft", "deepspeed", "bitsandbytes", "torchao", "trl", "torchtitan"),
    "megatron.core",
)
"""Libraries other than torch that decide allocations."""


def versions(torch: Any, libraries: "Collection[str] | None" = None) -> dict[str, str]:
    """Return the versions of imported libraries that decide allocations, or of those in `libraries` only."""
    found = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "python": sys.version.split()[0]}
    for name in LIBRARIES:
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "__version__") and (libraries is None or name in libraries):
            found[name] = str(module.__version__)
    return found


def device_facts(torch: Any, device: int, native: Any) -> dict[str, Any]:
    """Return the card as this process sees it; on a ghost also its number among all cards of the machine."""
    properties = torch.cuda.get_device_properties(device)
    others = {other: read_peaks(torch, other) for other in range(torch.cuda.device_count()) if other != device}
    return {
        "index": device,
        "card": native.card(device) if native is not None else device,
        "others": [{"index": other, **found} for other, found in others.items() if found["reserved_bytes"]],
        "name": properties.name,
        "total_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "context_bytes": CONTEXT_BYTES,
        "devices": torch.cuda.device_count(),
    }


def place(torch: Any) -> tuple[int, int]:
    """Return rank and world size; the launcher's where there is no process group or it has ended."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if ranks.left is not None:
        return ranks.left
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
