"""How long the processes of a dry-run live: no longer than the run, whatever becomes of tonnage."""

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

PR_SET_PDEATHSIG: Final = 1
"""Linux's prctl option: the signal that a process gets when the one that forked it dies."""

_PATIENCE_SECONDS: Final = 5.0
"""How long a process that was asked to end may take."""


@contextlib.contextmanager
def held_open(pipe: Path) -> Iterator[None]:
    """A named pipe of which whoever reads it hears when the block is left, and when this process is killed."""
    os.mkfifo(pipe)
    writing = os.open(pipe, os.O_RDWR)
    try:
        yield
    finally:
        os.close(writing)


def ends_with(parent: int) -> Callable[[], None]:
    """What a forked child does before it becomes the command: it asks to be ended with its parent."""
    prctl = ctypes.CDLL(None).prctl  # found here: between fork and exec as little as possible is done

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before
            os._exit(1)

    return ask


def end(process: "subprocess.Popen[bytes]", run: str) -> None:
    """End the command, its process group, and whoever else has this run's GHOST_SHM in its environment.

    The last are services that a program starts in sessions of their own: on a ghost nobody could use them.
    """
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
    for left in _of_run(run):
        with contextlib.suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)


def _of_run(run: str) -> Iterator[int]:
    """The processes that were started with this value of GHOST_SHM; those of other users cannot be read."""
    said = f"GHOST_SHM={run}".encode()
    for place in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if said in place.read_bytes().split(b"\0"):
                yield int(place.parent.name)
