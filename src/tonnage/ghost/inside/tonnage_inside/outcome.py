"""How the program ended: completed, out of memory, or failed; with the message and the Python stack."""

import os
import sys
import traceback
from types import TracebackType
from typing import Any

_OURS = os.path.dirname(__file__)


def of_exception(error: BaseException, watch: Any) -> dict[str, Any]:
    """The outcome that an uncaught exception means.  Phase and module are those of the failed allocation."""
    is_oom = type(error).__name__ == "OutOfMemoryError"
    outcome: dict[str, Any] = {
        "kind": "oom" if is_oom else "failed",
        "message": " ".join(str(error).split()) or type(error).__name__,
        "error": type(error).__name__,
        "stack": [
            f"{frame.filename}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_tb(error.__traceback__)
            if os.path.dirname(frame.filename) != _OURS
        ],
    }
    if is_oom and watch.ooms:
        outcome |= watch.ooms[-1]
    return outcome


def hear_uncaught(watch: Any, store: dict[str, Any]) -> None:
    """Chain into sys.excepthook: put the outcome of an uncaught exception into `store`."""
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        store.update(of_exception(error, watch))
        shown(kind, error, trace)

    sys.excepthook = hook
