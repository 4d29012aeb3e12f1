"""The process that takes the rows' steps: imports the libraries once, then forks a child with a fresh card for each.

Started by `benchmarks.accuracy.runner` in a ghost's environment.  A request is a JSON line: its number, the script,
its arguments and the card's settings; the answer, also a line, the number and what the script returned or its error.
As many children run at a time as the first argument says.
"""

import functools
import importlib
import json
import os
import sys
import traceback
from typing import Any

import torch
from tonnage_inside import shortcuts, values

from tonnage.ghost import card, preload


def serve(most: int) -> None:
    """Answer until standard input ends."""
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever libraries print must not mix with the answers
    running: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        _import_libraries(request["script"])
        if len(running) >= most:
            _await_one(running, answers)
        child = os.fork()
        if child == 0:
            _say(answers, request["number"], _answer(request))
            os._exit(0)
        running[child] = request["number"]
    while running:
        _await_one(running, answers)


@functools.cache
def _import_libraries(name: str) -> None:
    """What the jobs of a script share: its `prepare`, its IMPORTS, and its `rehearse`, if it has them."""
    script = importlib.import_module(f"benchmarks.accuracy.scripts.{name}")
    getattr(script, "prepare", lambda: None)()
    for library in getattr(script, "IMPORTS", ()):
        preload.imported(library)
    getattr(script, "rehearse", lambda: None)()


def _await_one(running: dict[int, int], answers: int) -> None:
    """Until one child has ended; answers for it if it could not."""
    child, status = os.wait()
    number = running.pop(child)
    if status:
        _say(answers, number, {"error": f"the process died (status {status})"})


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
    serve(int(sys.argv[1]))
