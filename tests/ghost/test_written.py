"""What is written inside a ghost's process and what reads it outside agree; neither can import the other."""

import sys

from tonnage.ghost.process import INSIDE
from tonnage.trace import trace

sys.path.append(str(INSIDE))
from tonnage_inside import written


def test_events_have_the_same_codes() -> None:
    assert written.ACTIONS == {name: code for code, name in enumerate(trace.ACTIONS)}


def test_files_have_the_same_version() -> None:
    assert written.FORMAT_VERSION == trace.FORMAT_VERSION
