"""Files that one process of a dry-run writes: its progress after every optimizer step, and its trace at the end.

The trace is written when the first loop has made its steps (`loops`), and once more, with what the program did
afterwards, as `PID.rest.trace`.  A process that is killed leaves only its progress, `PID.progress`.  A process that
hangs is asked for its trace: a thread of its own reads the pipe `stop` in the folder and goes on when tonnage closes
the other end.  The pipe `alive` closes when tonnage has ended everything or has died; the process then ends, since
nobody reads the rest.
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
from .allocator_guard import read_peaks
from .imports import tell_missing
from .operations import OperationCounter
from .watch import Watch

STOP = "stop"
"""Name of the pipe that tonnage creates, and whose writing end it holds open as long as the program may run."""

ALIVE = "alive"
"""Name of the pipe whose writing end tonnage holds open as long as it lives."""


_PROGRESS = ".progress"
"""Ending of the file with the progress of a process that uses the GPU."""

_WRITING_SECONDS = 8.0
"""Longest time for which a process that is killed may write its trace."""
_REST = ".rest.trace"
"""Ending of the file with all of a process's trace, where the first one was written before its end."""

REACHED = "reached"
"""Name of a file that exists once a Python process of the command has found the ghost."""


def begin(folder: str) -> None:
    """Note that this Python process has found the ghost.

    If it fails before it uses the GPU, `PID.failed` has the error; `PID.missing` has the modules that the program
    imports and that are not installed.
    """
    shown = sys.excepthook
    missing: dict[str, None] = {}

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
            _write(folder, f"{os.getpid()}.failed", {**outcome.describe(error), "cuda": cuda})
        shown(kind, error, trace)

    def lacks(name: str) -> None:
        missing[name] = None
        _write(folder, f"{os.getpid()}.missing", {"names": list(missing)})

    sys.excepthook = hook
    tell_missing(lacks)
    _write(folder, REACHED, {})


def _write(folder: str, name: str, document: dict[str, Any]) -> None:
    """Write a file that exists completely or not at all."""
    path = os.path.join(folder, name)
    draft = f"{path}.{os.getpid()}.partial"
    with contextlib.suppress(OSError):  # tonnage has given up and removed the folder
        with open(draft, "w") as file:
            json.dump(document, file)
        os.replace(draft, path)


LEAST_SECONDS = 30.0
"""Lower bound of the time limit of the step whose operations are counted, which is the time of all before it."""


def _has_compiled() -> bool:
    """Return whether the program's layers are compiled: no mode of the dispatcher sees their operations then."""
    frames = getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COUNTER", 0)
    return bool(frames)


def _runs(process: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _name() -> str:
    """Return a readable name of this process: the program's file, and which of its processes it is."""
    program = os.path.basename(getattr(sys, "argv", [""])[0]) or "python"
    process = multiprocessing.current_process().name
    return program if process == "MainProcess" else f"{program} {process}"


class Recording:
    """Writes one process's files into `folder`; hooks put the outcome of the program into `ended`."""

    def __init__(self, watch: Watch, folder: str, source: str, assumed: Callable[[], list[str]]) -> None:
        self.watch = watch
        self.folder = folder
        self.source = source
        self.assumed = assumed
        self.ended: dict[str, Any] = {}
        self._leave, self._kill = os._exit, os.kill
        self._process: int | None = None
        self._written = threading.Lock()
        self._has_stepped = False
        self._is_complete = False
        self.counts = False
        """True to make one more step, whose operations are counted."""
        self._counted: OperationCounter | None = None
        self._counted_marks: list[int] = []
        """First mark of the step whose operations were counted, and the first one behind it."""
        self._late: threading.Timer | None = None
        self._first_steps = 0
        """Steps that were made before the one that is counted."""

    def begin(self) -> None:
        """Begin in a process that uses the GPU from now on, which may be a fork of one that did."""
        self._process = os.getpid()
        self._written = threading.Lock()
        self.note()
        threading.Thread(target=self._wait_for_stop, name="tonnage-stop", daemon=True).start()

    def note(self, *_: Any) -> None:
        """Write the progress of this process, in case it is killed."""
        if os.getpid() != self._process:
            return
        torch = self.watch.torch
        self._look_at_host()
        document = {
            "rank": written.place(torch)[0],
            "name": _name(),
            "steps": self.watch.made_steps,
            "peaks": read_peaks(torch, written.fullest(torch)),
            "host_bytes": host.resident_peak_bytes(),
            "unwound": self.watch.loops.unwound,
            "is_counting": self._counted is not None,
        }
        _write(self.folder, f"{self._process}{_PROGRESS}", document)

    def _look_at_host(self) -> None:
        """Measure the workers of this process; after the first step, what was loaded counts no more."""
        with contextlib.suppress(OSError):  # tonnage has given up and removed the folder
            names = [name for name in os.listdir(self.folder) if name.endswith(_PROGRESS)]
            host.WORKERS.look(os.getpid(), {int(name.removesuffix(_PROGRESS)) for name in names})
        if self.watch.made_steps and not self._has_stepped:
            self._has_stepped = True
            host.ZEROS.end_first_step()

    def write(self) -> None:
        """Write the trace, or what came after it; only in a process that used the GPU, not in those it forked."""
        if os.getpid() != self._process:
            return
        if self._written.acquire(blocking=False):
            self._write_trace(".trace")
        elif self._is_complete:
            self._write_trace(_REST)

    def _write_trace(self, ending: str) -> None:
        before: Any = None
        with contextlib.suppress(ValueError):  # in another thread than the main one
            before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it when another rank has ended
        watch = self.watch
        if watch.script is not None:
            watch.script.facts |= {
                "idle_elements": watch.idle_elements(),
                "passes_a_step": watch.passes_a_step,
                "loops": list(watch.loops.rows),
                "counted_marks": self._counted_marks,
                "complete": self._is_complete,
                "unwound": watch.loops.unwound,
                "is_cut": watch.loops.is_cut,
                "is_evaluation_cut": watch.loops.is_evaluation_cut,
                "keeping": list(watch.loops.keeping),
                "shortage": watch.shortage_outcome(),
            }
        with contextlib.suppress(FileNotFoundError):  # tonnage has given up and removed the folder
            # Who catches a shortage after the wanted steps has made them.
            ended = self.ended or (watch.shortage_outcome() if ending != _REST else {})
            path = os.path.join(self.folder, f"{self._process}{ending}")
            written.write(path, watch, ended, self.assumed(), self.source)
        if self._is_complete and before is not None:
            signal.signal(signal.SIGTERM, before)

    def complete(self) -> None:
        """Write the trace of a loop that has made its steps."""
        if os.getpid() != self._process:
            return
        if not self._is_complete and self.watch.script is not None:
            self.watch.script.facts["compiled"] = _has_compiled()
        self._is_complete = True
        self.write()

    def stop(self) -> None:
        """Write the trace after the last step of a loop, and count the operations of one more if wanted."""
        if os.getpid() != self._process:
            return
        if self._counted is not None:
            self._end_counting()
        elif not self._is_complete:
            self.complete()
            self._begin_counting()

    def end_step(self) -> bool:
        """End the counting if its step is made; return whether no further step is wanted."""
        if os.getpid() != self._process or (not self._is_complete and self.counts and not _has_compiled()):
            return os.getpid() != self._process
        if not self._is_complete:
            self.complete()
        if self._counted is None:
            return True
        if self.watch.count_made() <= self._first_steps:
            return False
        self._end_counting()
        return True

    def end(self) -> None:
        """Write the trace and end the process, after the last step, when there can be no further one."""
        if os.getpid() == self._process:
            self.write()
            self._flush_and_leave(0)

    def _begin_counting(self) -> None:
        """Begin to count the operations of the next step, if wanted and possible, and if no evaluation is first."""
        watch = self.watch
        if not self.counts or watch.native is None or _has_compiled() or not watch.torch.is_grad_enabled():
            return
        self._first_steps = watch.count_made()
        self._counted = OperationCounter(watch.torch, watch.native, lambda: watch.marks[-1][1])
        took = time.perf_counter() - watch.began
        self._late = threading.Timer(max(LEAST_SECONDS, took), self._flush_and_leave, (0,))
        self._late.daemon = True
        self._late.start()
        self._counted_marks = [len(watch.marks)]
        self._counted.start()
        self.note()

    def _end_counting(self) -> None:
        counted, self._counted = self._counted, None
        self._counted_marks.append(len(self.watch.marks))
        if self._late is not None:
            self._late.cancel()
        if counted is not None and counted.stop():
            with contextlib.suppress(OSError):  # tonnage has given up and removed the folder
                counted.write(os.path.join(self.folder, f"{self._process}.worked"), self._phase)
        self.note()

    def _phase(self, mark: int) -> str:
        return str(self.watch.marks[mark][1])

    def leave_at_once(self, status: int) -> NoReturn:
        """Write the trace and end the process at once; replaces os._exit."""
        self.write()
        self._leave(status)

    def kill(self, process: int, number: int) -> None:
        """Send a signal; SIGKILL only once the process has written its trace.  Replaces os.kill.

        Engines kill their workers a few seconds after they asked them to end.
        """
        path = os.path.join(self.folder, str(process))
        deadline = time.monotonic() + _WRITING_SECONDS
        while number == signal.SIGKILL and os.path.exists(path + _PROGRESS) and not os.path.exists(f"{path}.trace"):
            if not _runs(process) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        self._kill(process, number)

    def at_exit(self) -> None:
        """Write the trace when Python is about to end by itself.

        After an uncaught exception the process ends here: autograd's threads may still hold what the failed backward
        had made, want the interpreter to release it, and find it gone, which ends the process by SIGABRT.
        """
        if os.getpid() != self._process:
            return
        self.write()
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
            self.ended = {"kind": "stopped", **self.watch.describe_latest(), "stack": stack}
            self.write()
            self._wait_for(ALIVE)
            self._leave(1)

    def _wait_for(self, name: str) -> None:
        """Wait until the other end of this pipe is closed.  Raises OSError if there is no pipe."""
        reading = os.open(os.path.join(self.folder, name), os.O_RDONLY | os.O_NONBLOCK)  # else it waits for a writer
        os.set_blocking(reading, True)
        os.read(reading, 1)
        os.close(reading)
