"""Work done in a process of its own, so that each has a fresh CUDA context and a failure ends only itself.

The parent imports everything once and never touches CUDA; children are forked from it (about a second each instead
of eight).  Where a forked child cannot use CUDA, because some import did touch it, the caller is told.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any


def run(work: Callable[[], Iterator[dict[str, Any]]], *, timeout_seconds: float) -> dict[str, Any]:
    """Everything `work` yielded, put together, with `error` if it then raised, crashed or took too long."""
    return {key: value for part in stream(work, timeout_seconds=timeout_seconds) for key, value in part.items()}


def stream(work: Callable[[], Iterator[dict[str, Any]]], *, timeout_seconds: float) -> Iterator[dict[str, Any]]:
    """Each value of the iterator as it comes; the last is `{"error": ...}` if it did not come to its end."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _work_and_leave(work, writing)
    os.close(writing)
    try:
        yield from _lines(reading, child, timeout_seconds)
    finally:
        os.close(reading)


def _work_and_leave(work: Callable[[], Iterator[dict[str, Any]]], writing: int) -> None:
    try:
        for value in work():
            _write(writing, value)
        _write(writing, {"ended": True})
    except BaseException as error:  # whatever happens here must reach the parent, never run on as a second parent
        lines = traceback.format_exception(error)
        _write(writing, {"error": f"{type(error).__name__}: {error}", "traceback": "".join(lines)[-3000:]})
    finally:
        os._exit(0)


def _write(writing: int, value: dict[str, Any]) -> None:
    line = memoryview(json.dumps(value, default=str).encode() + b"\n")
    while line:
        line = line[os.write(writing, line) :]


def _lines(reading: int, child: int, timeout_seconds: float) -> Iterator[dict[str, Any]]:
    deadline = time.monotonic() + timeout_seconds
    waiting = b""
    while True:
        ready, _, _ = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            yield {"error": f"stopped after {timeout_seconds:.0f} s"}
            return
        received = os.read(reading, 1 << 20)
        if not received:
            _, status = os.waitpid(child, 0)
            yield {"error": f"the process ended without an answer: {_cause(status)}"}
            return
        *complete, waiting = (waiting + received).split(b"\n")
        for line in complete:
            value = json.loads(line)
            if value == {"ended": True} or "error" in value:
                os.waitpid(child, 0)
                if "error" in value:
                    yield value
                return
            yield value


def _cause(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit code {os.waitstatus_to_exitcode(status)}"
