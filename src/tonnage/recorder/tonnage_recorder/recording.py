"""What one process of a dry-run leaves behind: how far it came, after every optimizer step, and in the end its trace.

A process that is killed leaves only the former, `PID.progress`.  One that hangs is asked for its trace: the pipe
`stop` in the folder is read by a thread of its own, which goes on when tonnage closes the other end.  The pipe
`alive` closes when tonnage has ended everything, or is dead: then nobody wants to know the rest.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from . import host, outcome, written
from .imports import tell_missing
from .operations import Worked
from .untouched import peaks
from .watch import Watch

STOP = "stop"
"""The name of the pipe; tonnage makes it, and holds its writing end open as long as the program may run."""

ALIVE = "alive"
"""The name of the other one, which it holds open as long as it lives."""


REACHED = "reached"
"""The name of a file that is there when a Python of the command has found the ghost."""


def begin(folder: str) -> None:
    """This Python has found the ghost.  If it fails before it uses the GPU, with what is told in `PID.failed`; what
    the program asks for and is not installed, in `PID.missing`."""
    shown = sys.excepthook
    missing: dict[str, None] = {}

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
            _write(folder, f"{os.getpid()}.failed", {**outcome.described(error), "cuda": cuda})
        shown(kind, error, trace)

    def lacks(name: str) -> None:
        missing[name] = None
        _write(folder, f"{os.getpid()}.missing", {"names": list(missing)})

    sys.excepthook = hook
    tell_missing(lacks)
    _write(folder, REACHED, {})


def _write(folder: str, name: str, document: dict[str, Any]) -> None:
    """A file that is there whole or not at all."""
    path = os.path.join(folder, name)
    draft = f"{path}.{os.getpid()}.partial"
    with contextlib.suppress(OSError):  # tonnage has given up and removed the folder
        with open(draft, "w") as file:
            json.dump(document, file)
        os.replace(draft, path)


LEAST_SECONDS = 30.0
"""How long the step that is counted may take at the least; else as long as all before it."""


def _has_compiled() -> bool:
    """Whether the program's layers are compiled: what they do is then seen by no mode of the dispatcher."""
    frames = getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COUNTER", 0)
    return bool(frames)


def _name() -> str:
    """What a reader would call this process: the program's file, and which of its processes it is."""
    program = os.path.basename(getattr(sys, "argv", [""])[0]) or "python"
    process = multiprocessing.current_process().name
    return program if process == "MainProcess" else f"{program} {process}"


class Recording:
    """Writes one process's files into `folder`; `ended` is filled in by whoever learns how the program ended."""

    def __init__(self, watch: Watch, folder: str, source: str, assumed: Callable[[], list[str]]) -> None:
        self.watch = watch
        self.folder = folder
        self.source = source
        self.assumed = assumed
        self.ended: dict[str, Any] = {}
        self._leave = os._exit
        self._process: int | None = None
        self._written = threading.Lock()
        self.counts = False
        """Whether one step more is made, whose operations are counted."""
        self._counted: Worked | None = None

    def begin(self) -> None:
        """This process uses the GPU from now on: one that was forked off before, too."""
        self._process = os.getpid()
        self._written = threading.Lock()
        self.note()
        threading.Thread(target=self._wait_for_stop, name="tonnage-stop", daemon=True).start()

    def note(self, *_: Any) -> None:
        """Keep how far this process came, for the case that it is killed."""
        if os.getpid() != self._process:
            return
        torch = self.watch.torch
        document = {
            "rank": written.place(torch)[0],
            "name": _name(),
            "steps": self.watch.steps + self.watch._stepped,  # the latest counts when the next one begins
            "peaks": peaks(torch, written.fullest(torch)),
            "host_bytes": host.resident_peak_bytes(),
        }
        _write(self.folder, f"{self._process}.progress", document)

    def write(self) -> None:
        """Write the trace, once; only in a process that used the GPU, not in those it forked."""
        if os.getpid() == self._process and self._written.acquire(blocking=False):
            with contextlib.suppress(ValueError):  # in another thread than the main one
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it when another rank has ended
            path = os.path.join(self.folder, f"{self._process}.trace")
            with contextlib.suppress(FileNotFoundError):  # as above
                ended = self.ended or self.watch.given_up()
                written.write(path, self.watch, ended, self.assumed(), self.source)

    def stop(self) -> None:
        """The steps are done: write the trace, count what the operations of one more work, and end the process."""
        if os.getpid() != self._process:
            return
        if self._counted is not None:
            self._end_counting(self._counted)
        if self.watch.script is not None:
            self.watch.script.said["compiled"] = _has_compiled()
        self.write()
        if not self._begin_counting():
            self._flush_and_leave(0)

    def end(self) -> None:
        """The steps are done, and there can be no further one."""
        if os.getpid() == self._process:
            self.write()
            self._flush_and_leave(0)

    def _begin_counting(self) -> bool:
        """Whether the step that begins now is counted; whatever becomes of it, the trace is written."""
        watch = self.watch
        if not self.counts or watch.native is None or _has_compiled():
            return False
        self._counted = Worked(watch.torch, watch.native, lambda: watch.marks[-1][1])
        took = time.perf_counter() - watch.began
        late = threading.Timer(max(LEAST_SECONDS, took), self._flush_and_leave, (0,))
        late.daemon = True
        late.start()
        self._counted.start()
        return True

    def _end_counting(self, counted: Worked) -> None:
        if counted.stop():
            with contextlib.suppress(OSError):  # tonnage has given up and removed the folder
                counted.write(os.path.join(self.folder, f"{self._process}.worked"), self._phase)
        self._flush_and_leave(0)

    def _phase(self, mark: int) -> str:
        return str(self.watch.marks[mark][1])

    def leave_at_once(self, status: int) -> NoReturn:
        """In place of os._exit."""
        self.write()
        self._leave(status if self._counted is None else 0)

    def at_exit(self) -> None:
        """Python is about to end by itself.

        After an uncaught exception the process ends here: autograd's threads may still hold what the failed backward
        had made, want the interpreter to release it, and find it gone, which ends the process by SIGABRT.
        """
        if os.getpid() != self._process:
            return
        self.write()
        if self._counted is not None:  # it ended, or failed, in a step that nobody asked for
            self._flush_and_leave(0)
        if self.ended and self.ended.get("error") != "KeyboardInterrupt":
            self._flush_and_leave(1)

    def _flush_and_leave(self, status: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # closed, by the program or its reader
                stream.flush()
        self._leave(status)

    def _wait_for_stop(self) -> None:
        with contextlib.suppress(OSError):
            self._wait_for(STOP)
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            stack = outcome.frames(traceback.extract_stack(frame)) if frame is not None else []
            self.ended = {"kind": "stopped", **self.watch.here(), "stack": stack}
            self.write()
            self._wait_for(ALIVE)
            self._leave(1)

    def _wait_for(self, name: str) -> None:
        """Until the other end of this pipe is closed, at once where it is.  Raises OSError where there is no pipe."""
        reading = os.open(os.path.join(self.folder, name), os.O_RDONLY | os.O_NONBLOCK)  # else it waits for a writer
        os.set_blocking(reading, True)
        os.read(reading, 1)
        os.close(reading)
