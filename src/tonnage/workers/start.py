"""Starts the warm worker, so that it ends with the process that asked for it also while it imports libraries."""

import contextlib
import ctypes
import os
import select
import signal
import sys
from collections.abc import Iterator

from tonnage.ghost.termination import PR_SET_PDEATHSIG


@contextlib.contextmanager
def ended_with_asker() -> Iterator[None]:
    """Have the kernel kill this process when the one that asked for it dies, until the block ends.

    Imports take seconds in which nobody reads standard input, whose end tells it at other times.  For longer than
    imports take it is not asked for: it means the thread that started the worker, which may end before it.
    """
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    asker = select.poll()
    asker.register(sys.stdin, 0)  # reports only that its other end was closed
    if asker.poll(0):
        os._exit(1)  # it died before
    try:
        yield
    finally:
        prctl(PR_SET_PDEATHSIG, 0)


if __name__ == "__main__":
    with ended_with_asker():
        from tonnage.workers import server
    server.serve()
