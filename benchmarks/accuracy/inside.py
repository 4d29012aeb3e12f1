"""The processes that take the rows' steps, each a fork of the one before: torch, a script's libraries, a row's card.

The first is started by `benchmarks.accuracy.runner` in a ghost's environment, with a socket as standard input, and
imports torch.  A message there names folders and variables and brings two pipes: a process with these has a script's
libraries in it once it is asked for the first row.  A request is a JSON line: its number, the script, its arguments
and the card's settings; the answer, also a line, the number and what the script returned or its error.  Whoever asks
says with each request that one more child may run.
"""

import functools
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any, Final

import torch
from tonnage_inside import shortcuts, values
from tonnage_recorder import native

from tonnage.workers import card, preload

MESSAGE_BYTES: Final = 1 << 16
"""More than any message has."""


def lend_torch() -> None:
    """Begin a process for each message until no one can send another."""
    preload.try_import("torch._dynamo")  # which each optimizer asks for
    asked = socket.socket(fileno=0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who reads the pipe sees when one has ended
    while True:
        message, pipes, *_ = socket.recv_fds(asked, MESSAGE_BYTES, 2)
        if not message:
            return
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            asked.close()
            for pipe, number in zip(pipes, (0, 1), strict=True):
                os.dup2(pipe, number)
                os.close(pipe)
            _belong_to(**json.loads(message))
            serve()
            os._exit(0)
        for pipe in pipes:
            os.close(pipe)


def _belong_to(paths: list[str], variables: dict[str, str]) -> None:
    """As if Python had been started with these folders before all others, and these variables."""
    for path in paths:
        if already := {name.removesuffix(".py") for name in os.listdir(path)} & sys.modules.keys():
            raise ImportError(f"{', '.join(sorted(already))} of {path}: torch has imported another")
    sys.path[1:1] = paths
    os.environ.update(variables)
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ["PYTHONPATH"]])


def serve() -> None:
    """Answer until standard input ends."""
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever libraries print must not mix with the answers
    running: dict[int, int] = {}
    ghost = native.load()
    if ghost is not None:
        ghost.back_python()
    values.leave_alone(torch)
    signal.signal(signal.SIGCHLD, lambda *of_signal: _answer_for_dead(running, answers, os.WNOHANG))
    for line in sys.stdin:
        request = json.loads(line)
        _import_libraries(request["script"])
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD,))  # until it is known whose end it is
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGCHLD,))
            _say(answers, request["number"], _answer(request))
            os._exit(0)
        running[child] = request["number"]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGCHLD,))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _answer_for_dead(running, answers, 0)


@functools.cache
def _import_libraries(name: str) -> None:
    """What the jobs of a script share: its `prepare`, its IMPORTS, and its `rehearse`, if it has them."""
    script = importlib.import_module(f"benchmarks.accuracy.scripts.{name}")
    getattr(script, "prepare", lambda: None)()
    for library in getattr(script, "IMPORTS", ()):
        preload.try_import(library)
    getattr(script, "rehearse", lambda: None)()
    gc.collect()
    gc.freeze()  # what was imported stays; a child that looked through it for garbage would also copy its pages


def _answer_for_dead(running: dict[int, int], answers: int, how: int) -> None:
    """Answers for children that ended and could not; `how` is that of waitpid."""
    for child in list(running):
        with suppress(ChildProcessError):  # it ended while this was being done, and was answered for
            ended, status = os.waitpid(child, how)
            if ended and status:
                _say(answers, running[child], {"error": f"the process died (status {status})"})
            if ended:
                del running[child]


def _say(answers: int, number: int, answer: dict[str, Any]) -> None:
    """One line in one write, which a pipe does not mix with others of this size."""
    os.write(answers, (json.dumps({"number": number, **answer}) + "\n").encode())


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return _measure(request)
    except BaseException as error:  # the child must answer whatever happens
        if os.environ.get("TONNAGE_DEBUG"):
            traceback.print_exc()
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())[:400]}


def _measure(request: dict[str, Any]) -> dict[str, Any]:
    """What the script says of itself on a fresh card."""
    ghost = card.take(request["settings"], rank=request["rank"], world_size=request["ranks"])
    values.install(values.Policy(torch, ghost))
    shortcuts.install()
    script = importlib.import_module(f"benchmarks.accuracy.scripts.{request['script']}")
    answer = script.measure(**request["arguments"])
    assert isinstance(answer, dict)
    return answer


if __name__ == "__main__":
    lend_torch()
