"""What a worker says of a step that failed."""

import errno
import sys
from typing import Any

import pytest

from tonnage.ghost.process import INSIDE


@pytest.fixture
def one_line(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [*sys.path, str(INSIDE)])
    from tonnage.ghost import worker

    return worker._one_line


def test_the_cause_is_told_where_the_error_does_not(one_line: Any) -> None:
    error = RuntimeError("failed to run forward")
    error.__cause__ = AttributeError("no such\nthing")
    told = "RuntimeError: failed to run forward; because of AttributeError: no such thing"
    assert one_line(error) == f"The step failed: {told}"


def test_an_old_transformers_is_named(one_line: Any) -> None:
    told = one_line(ImportError("cannot import name 'x' from 'transformers' (/some/where.py)"))
    assert "cannot import name 'x' from 'transformers')" in told
    assert told.endswith("; upgrade it.")


def test_a_full_disk_is_named(one_line: Any) -> None:
    assert "of /some/where;" in one_line(OSError(errno.ENOSPC, "No space left on device", "/some/where"))
