"""The process that takes the rows' steps: imports torch once, then forks a child with a fresh card for each.

Started by `benchmarks.accuracy.runner` in a ghost's environment.  A request is a JSON line: the script, its arguments
and the card's settings; the answer what the script returned, or its error.
"""

import importlib
import json
import os
import sys
import traceback
from typing import Any

import torch
from tonnage_inside import native, shortcuts, values

from tonnage.ghost import preload


def serve() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    script = importlib.import_module(f"benchmarks.accuracy.scripts.{request['script']}")
    for library in getattr(script, "IMPORTS", ()):
        preload.imported(library)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        try:
            answer = _measure(script, request)
        except BaseException as error:  # the child must answer whatever happens
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:400]}
            if os.environ.get("TONNAGE_DEBUG"):
                traceback.print_exc()
        os.write(write_end, json.dumps(answer).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        reply = pipe.read()
    _, status = os.waitpid(child, 0)
    answer = json.loads(reply) if reply else {"error": f"the process died (status {status})"}
    assert isinstance(answer, dict)
    return answer


def _measure(script: Any, request: dict[str, Any]) -> dict[str, Any]:
    """What the script says of itself on a fresh card."""
    ghost = native.load()
    if ghost is None:
        raise RuntimeError("this runs outside a ghost environment")
    for name, value in request["settings"].items():
        ghost.set(name.removeprefix("GHOST_"), value)
        os.environ[name] = value
    values.Policy(torch, ghost).install()
    shortcuts.install()
    answer = script.measure(**request["arguments"])
    assert isinstance(answer, dict)
    return answer


if __name__ == "__main__":
    serve()
