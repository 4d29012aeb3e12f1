"""The layout of what a Trace holds: codes of allocator actions, kinds and fields of the ghost's log records.

The writer (beside torch, without tonnage) and the reader (the room `trace`) share it; a test compares it with `struct
ghost_record` and `enum record_kind` in ghost.h.
"""

import struct
from typing import Final

FORMAT_VERSION: Final = 1
"""Version of the format of a Trace's archive."""

ACTIONS: Final = (
    *("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap"),
    *("oom", "snapshot", "workspace_snapshot"),
)
"""Names of the allocator's trace events, in the order of their codes in a Trace."""

EVENT_COLUMNS: Final = ("action", "address", "size", "stream", "mark")
"""Columns of the allocator's trace; each has 64-bit signed integers."""

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
"""Names of the kinds of records in the ghost's log, by `enum record_kind`."""

FIELDS: Final = (
    *(("kind", "B"), ("device", "B"), ("flags", "H"), ("mark", "I"), ("name", "I")),
    *(("grid_x", "I"), ("grid_y", "I"), ("grid_z", "I"), ("block", "I"), ("shared", "I")),
    *(("stream", "Q"), ("bytes", "Q"), ("address", "Q"), ("address2", "Q")),
)
"""Fields of a record in their order (`struct ghost_record`), each with its type as the module struct names it."""

RECORD: Final = struct.Struct("<" + "".join(code for _, code in FIELDS))
"""One record: 64 bytes, little-endian, without padding."""


def offset_of(field: str) -> int:
    """Return the offset of a field in a record, in bytes."""
    before = [code for _, code in FIELDS[: [name for name, _ in FIELDS].index(field)]]
    return struct.calcsize("<" + "".join(before))
