"""Records of the log are read inside as they are written, and as they are read outside."""

import sys

import numpy as np

from tonnage.ghost.process import INSIDE
from tonnage.trace import trace
from tonnage.trace.trace import Activity, packed

sys.path.append(str(INSIDE))
from tonnage_inside import records


def test_records_of_the_log_have_the_same_codes() -> None:
    assert trace.KERNEL_KINDS[records.EVENT] == "event_record"
    assert [trace.KERNEL_KINDS[kind] for kind in records.OF_CARD] == ["malloc", "free", "vm_map", "vm_unmap"]
    assert [trace.KERNEL_KINDS[kind] for kind in records.PINNED] == ["pinned_alloc", "pinned_free"]
    assert records.RECORD.itemsize == trace._RECORD.size


def test_records_are_read_as_the_ghost_writes_them() -> None:
    record = packed(Activity("vm_map", "", 7, 0, (1, 2, 3), 4, 5, 2**33, 4096, 8192), {"": 0})
    [(kind, mark, count, *addresses)] = np.frombuffer(record, dtype=records.RECORD).tolist()
    assert (trace.KERNEL_KINDS[kind], mark, count, addresses) == ("vm_map", 7, 2**33, [4096, 8192])
