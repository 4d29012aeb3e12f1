"""Ends the processes of a dry-run with the run, also if tonnage is killed."""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

PR_SET_PDEATHSIG: Final = 1
"""Linux's prctl option: the signal that a process gets when the one that forked it dies."""

_PATIENCE_SECONDS: Final = 5.0
"""Time that a process has to end after it was asked to."""

_LOOK_SECONDS: Final = 0.02
"""Time between two looks for processes that remain."""


@contextlib.contextmanager
def held_open(pipe: Path) -> Iterator[None]:
    """Create a named pipe whose readers reach its end when the block is left or this process is killed."""
    os.mkfifo(pipe)
    writing = os.open(pipe, os.O_RDWR)
    try:
        yield
    finally:
        os.close(writing)


def ends_with(parent: int) -> Callable[[], None]:
    """Return the function that a forked child calls before it becomes the command, to be ended with its parent."""
    prctl = ctypes.CDLL(None).prctl  # found here: between fork and exec as little as possible is done

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before
            os._exit(1)

    return ask


def end(process: "subprocess.Popen[bytes]", run: str) -> None:
    """End the command, its process group, and every other process with this run's GHOST_SHM in its environment.

    The last are services that a program starts in sessions of their own, which are useless after the run, and what
    these start.  Processes that are being started meanwhile are looked for again.
    """
    descendants = _find_descendants(process.pid)
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signal_number)
        except ProcessLookupError:
            break
        if process.poll() is None:
            try:
                process.wait(timeout=_PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                continue
    process.wait()
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (remaining := [*_list_running(descendants), *_find_processes(run)]) and time.monotonic() < deadline:
        for number in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)


class _Started(NamedTuple):
    """A process, told from a later one with its number by when it was started."""

    process: int
    started: str


def _find_descendants(process: int) -> list[_Started]:
    """Return the processes that this one has started, and those that they have, also with another environment."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(path.parent.name))
    found, waiting = [], list(parents.get(process, []))
    while waiting:
        child = waiting.pop()
        found.append(_Started(child, _started_at(child)))
        waiting += parents.get(child, [])
    return found


def _list_running(processes: list[_Started]) -> Iterator[int]:
    """Yield the numbers of those that have not ended."""
    return (one.process for one in processes if one.started and _started_at(one.process) == one.started)


def _started_at(process: int) -> str:
    """Return when a process was started, in the kernel's ticks; empty if it has ended."""
    try:
        words = Path("/proc", str(process), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if words[0] == "Z" else words[19]


def _find_processes(run: str) -> Iterator[int]:
    """Yield the processes that were started with this value of GHOST_SHM; those of other users cannot be read."""
    variable = f"GHOST_SHM={run}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if variable in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)
