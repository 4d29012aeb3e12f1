"""Records of the log: the layout in Python is the one of the C code, and is read as it is written."""

import re
import sys
from pathlib import Path

import numpy as np

from tonnage.ghost import environment as ghost_environment
from tonnage.ghost.environment import PATH
from tonnage.trace.trace import Activity, pack_activity

sys.path.extend(PATH.split(":"))
from tonnage_recorder import record_layout, records

HEADER = (Path(ghost_environment.__file__).parent / "native" / "ghost.h").read_text(encoding="utf-8")
TYPES = {"uint8_t": "B", "uint16_t": "H", "uint32_t": "I", "uint64_t": "Q"}


def test_fields_are_those_of_the_c_struct() -> None:
    [body] = re.findall(r"struct ghost_record \{(.*?)\};", HEADER, re.DOTALL)
    declared = re.findall(r"(uint\d+_t) ([\w, ]+);", body)
    fields = tuple((name, TYPES[kind]) for kind, names in declared for name in names.split(", "))
    assert fields == record_layout.FIELDS
    assert record_layout.RECORD.size == 64


def test_kinds_are_those_of_the_c_enum() -> None:
    codes = {name.lower(): int(code) for name, code in re.findall(r"RECORD_(\w+) = (\d+),", HEADER)}
    assert set(codes.values()) == set(record_layout.KERNEL_KINDS)
    same = {name for code, name in record_layout.KERNEL_KINDS.items() if codes.get(name) == code}
    renamed = {"event_record": "event", "stream_wait": "wait", "host_function": "host_call"}
    others = {name: codes[renamed[name]] for name in set(record_layout.KERNEL_KINDS.values()) - same}
    assert {record_layout.KERNEL_KINDS[code] for code in others.values()} == set(others)


def test_records_of_the_log_have_the_same_codes() -> None:
    assert [record_layout.KERNEL_KINDS[kind] for kind in records.OF_CARD] == ["malloc", "free", "vm_map", "vm_unmap"]
    assert [record_layout.KERNEL_KINDS[kind] for kind in records.PINNED] == ["pinned_alloc", "pinned_free"]
    assert records.RECORD.itemsize == record_layout.RECORD.size


def test_records_are_read_as_the_ghost_writes_them() -> None:
    record = pack_activity(Activity("vm_map", "", 7, 0, (1, 2, 3), 4, 5, 2**33, 4096, 8192), {"": 0})
    [(kind, mark, count, *addresses)] = np.frombuffer(record, dtype=records.RECORD).tolist()
    assert (record_layout.KERNEL_KINDS[kind], mark, count, addresses) == ("vm_map", 7, 2**33, [4096, 8192])
