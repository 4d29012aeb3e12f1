"""Takes the steps of rows on ghost cards, each job once, as many at a time as there are slots."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

from benchmarks.accuracy import software
from benchmarks.accuracy.rows import METRICS, ROOT, Row
from benchmarks.accuracy.software import Given

from tonnage.catalog.devices import parse_cluster
from tonnage.cluster import Device
from tonnage.errors import TonnageError
from tonnage.ghost.environment import forking
from tonnage.ghost.wheel import Torch
from tonnage.units import GIB

Progress = Callable[[str], None]
Predicted = dict[str, Any]
"""GiB by metric, or `error`."""


def predict(
    rows: Sequence[Row],
    progress: Progress = lambda text: None,
    at_once: int | None = None,
    torch: str | None = None,
) -> list[tuple[Row, Predicted]]:
    """Each row with what the ghost says of it; `at_once` jobs at a time (default: one a core).

    `torch` is a version, or a folder that holds one, in place of the installed one and of those that rows name.
    """
    jobs = {row.job: row for row in rows}
    alike: dict[tuple[str, tuple[str, ...]], list[Row]] = defaultdict(list)
    for row in jobs.values():
        alike[row.script, row.software].append(row)
    most = at_once or len(os.sched_getaffinity(0))
    slots = threading.Semaphore(most)
    answers: dict[str, Predicted] = {}

    def take(chosen: Sequence[Row]) -> None:
        try:
            given = software.given(chosen[0].software, torch)
        except TonnageError as error:
            answers.update((row.job, {"error": str(error)}) for row in chosen)
        else:
            start = partial(roots.start, given)
            answers.update((row.job, answer) for row, answer in _of_process(chosen, progress, slots, start))

    # One more than slots, so that none is free while a process begins.
    with Roots() as roots, ThreadPoolExecutor(most + 1) as side_by_side:
        list(side_by_side.map(take, sorted(alike.values(), key=len, reverse=True)))
    ended: Predicted = {"error": "the ghost process ended early"}
    return [(row, answers.get(row.job, ended)) for row in rows]


def _of_process(
    chosen: Sequence[Row], progress: Progress, slots: threading.Semaphore, start: Callable[[], Process]
) -> Iterator[tuple[Row, Predicted]]:
    """Rows of one script and software with their predictions, as they come: scripts import libraries differently."""
    lent = _Lent(slots)
    lent.take(0)
    try:
        process = start()
        threading.Thread(target=_send, args=(process.requests, chosen, lent), daemon=True).start()
        with process.answers:
            for done, line in enumerate(process.answers, start=1):
                answer = json.loads(line)
                number = answer.pop("number")
                lent.give_back(number)
                row = chosen[number]
                progress(f"{row.script} {done} of {len(chosen)}: {row.source}: {row.name}")
                yield row, _in_gib(answer, parse_cluster(row.gpu).device)
    finally:  # also where it could not begin: others wait for its slots
        lent.end()


class _Lent:
    """The slots that one process's requests hold: of all processes' as many are under way as there are slots."""

    def __init__(self, slots: threading.Semaphore) -> None:
        self._slots = slots
        self._lock = threading.Lock()
        self._held: set[int] = set()
        self._ended = False
        self.begun = threading.Event()
        """Set by the first answer: until then a process imports, and one request is enough."""

    def take(self, number: int) -> bool:
        """Wait for a slot for this request; False if the process has ended meanwhile."""
        self._slots.acquire()
        with self._lock:
            if not self._ended:
                self._held.add(number)
                return True
        self._slots.release()
        return False

    def give_back(self, number: int) -> None:
        self.begun.set()
        with self._lock:
            if number in self._held:
                self._held.remove(number)
                self._slots.release()

    def end(self) -> None:
        """Nothing more will be answered."""
        with self._lock:
            self._ended = True
        for number in list(self._held):
            self.give_back(number)
        self.begun.set()


@dataclass(frozen=True)
class Process:
    """Both ends of one that takes rows of a script; when it has ended there are no more answers."""

    requests: TextIO
    answers: TextIO


class Roots:
    """For each torch a process that has imported it, from which those of scripts begin: it takes seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: dict[Torch, socket.socket] = {}
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Roots:
        return self

    def __exit__(self, *of_error: object) -> None:
        for end in self._sockets.values():
            end.close()
        for process in self._processes:
            process.wait()

    def start(self, given: Given) -> Process:
        """One with this software.  Raises GhostUnavailable."""
        with self._lock:
            if given.torch not in self._sockets:
                self._sockets[given.torch] = self._import(given.torch)
        asked, requests = os.pipe()
        answers, said = os.pipe()
        message = json.dumps({"paths": given.paths, "variables": dict(given.variables)}).encode()
        with suppress(ConnectionError):  # where it could not import torch, as its end says
            socket.send_fds(self._sockets[given.torch], [message], [asked, said])
        os.close(asked)
        os.close(said)
        return Process(os.fdopen(requests, "w", buffering=1), os.fdopen(answers))

    def _import(self, torch: Torch) -> socket.socket:
        variables = forking(torch)
        variables["PYTHONPATH"] = os.pathsep.join([variables["PYTHONPATH"], str(ROOT / "src"), str(ROOT)])
        # Else each job would start a pool of compilers for a handful of kernels.
        variables["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            command = [sys.executable, "-m", "benchmarks.accuracy.inside"]
            self._processes.append(subprocess.Popen(command, env=variables, stdin=there.fileno()))
        return here


def _send(pipe: Any, rows: Sequence[Row], lent: _Lent) -> None:
    """Each request when it has a slot, as the first has; a thread of its own, because answers come meanwhile."""
    with suppress(BrokenPipeError), pipe:
        for number, row in enumerate(rows):
            if number > 0:
                lent.begun.wait()
                if not lent.take(number):
                    return
            request = {"number": number, "settings": parse_cluster(row.gpu).device.ghost_settings()}
            asked = {name: getattr(row, name) for name in ("script", "arguments", "ranks", "rank")}
            pipe.write(json.dumps(request | asked) + "\n")


def _in_gib(answer: dict[str, Any], device: Device) -> Predicted:
    if "error" in answer:
        return answer
    found = {metric: answer[f"{metric}_bytes"] for metric in METRICS if f"{metric}_bytes" in answer}
    if "reserved" in found:
        found.setdefault("process", found["reserved"] + device.context_bytes)
    return {metric: size / GIB for metric, size in found.items()}
