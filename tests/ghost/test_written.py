"""What is written inside a ghost's process and what reads it outside agree; neither can import the other."""

import sys

from tonnage import trace
from tonnage.ghost.process import INSIDE

sys.path.append(str(INSIDE))
from tonnage_inside import pairs, written


def test_events_have_the_same_codes() -> None:
    assert written.ACTIONS == {name: code for code, name in enumerate(trace.ACTIONS)}


def test_files_have_the_same_version() -> None:
    assert written.FORMAT_VERSION == trace.FORMAT_VERSION


def test_records_of_the_log_have_the_same_codes() -> None:
    assert trace.KERNEL_KINDS[pairs._EVENT_RECORD] == "event_record"
    assert pairs._RECORD_BYTES == trace._RECORD.size
