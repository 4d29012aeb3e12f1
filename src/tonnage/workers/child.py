"""A fork of the worker that does one job, answers in one line and exits.

The worker has imported torch and never touches CUDA, so every job finds an unused card and a torch that has run
nothing, and whatever the job leaves behind ends with its process.
"""

import ctypes
import gc
import json
import os
import select
import shutil
import signal
import sys
import traceback
from typing import Any

from tonnage_inside import micro_batches, values

from tonnage.ghost.termination import PR_SET_PDEATHSIG
from tonnage.workers import failures, jobs

EVERY_MICRO_BATCH = "every micro-batch\n"
"""Reply that asks for the same job again with every micro-batch executed, as memory ran out in one that was not."""


class Child:
    """A forked process that does one job, as the worker sees it."""

    def __init__(self, request: dict[str, Any], policy: values.Policy) -> None:
        """Fork a process that does the job of `request`."""
        self._trace = request["trace"]
        reads, writes = os.pipe()
        worker = os.getpid()
        gc.freeze()  # imported objects stay; a child whose collector visited them would copy their pages
        self._process = os.fork()
        if self._process == 0:
            try:
                os.close(reads)
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() == worker:  # else the worker died before prctl, and nobody reads the reply
                    built: list[object] = []  # kept until the process exits: freeing the model takes time
                    os.write(writes, _reply(request, policy, built).encode())
            finally:
                os._exit(0)
        os.close(writes)
        self._replies = os.fdopen(reads)

    def reply(self) -> str:
        """Wait for the child's reply and return it: one line, or nothing if the child died."""
        self._wait()
        return self._replies.readline()

    def end(self) -> int:
        """Wait until the child has exited and return its status as `os.waitpid` does."""
        self._replies.close()
        return os.waitpid(self._process, 0)[1]

    def _wait(self) -> None:
        """Return when the child replies or exits; end worker and child if the process that asked is gone."""
        poll = select.poll()
        poll.register(self._replies, select.POLLIN)
        poll.register(sys.stdin, 0)  # reports only that its other end was closed
        if all(source == sys.stdin.fileno() for source, _ in poll.poll()):
            shutil.rmtree(os.path.dirname(self._trace), ignore_errors=True)
            os.killpg(0, signal.SIGKILL)


def _reply(request: dict[str, Any], policy: values.Policy, built: list[object]) -> str:
    """Do the job and return the line that answers it; `built` receives the objects to keep alive."""
    answer: dict[str, Any] = {"error": None}
    try:
        jobs.do(request, policy, built)
    except micro_batches.RanOut:
        return EVERY_MICRO_BATCH
    except BaseException as error:  # the worker waits for a reply whatever happens
        if os.environ.get("TONNAGE_DEBUG"):
            traceback.print_exc()
        answer = failures.answer(failures.explain(error))
    return json.dumps(answer) + "\n"
