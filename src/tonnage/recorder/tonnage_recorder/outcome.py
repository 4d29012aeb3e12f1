"""How the program ended: completed, out of memory, or failed; with the message and the Python stack."""

import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.process import BaseProcess
from types import FrameType, TracebackType
from typing import Any

OURS = ("tonnage_recorder", "tonnage_inside")
"""Packages whose frames are not the program's."""


def _here() -> str:
    """Return the folder that the program was started in; "" if it was deleted."""
    try:
        return os.path.join(os.getcwd(), "")
    except OSError:
        return ""


_STARTED_IN = _here()


def of_exception(error: BaseException, watch: Any) -> dict[str, Any]:
    """Return the outcome for an uncaught exception, with phase and module of the failed allocation.

    The outcome of another failure has the number of computed values that the program had read (`computed_reads`).
    """
    told, is_oom = _chain(error)[-1], ran_out(error)
    outcome: dict[str, Any] = {"kind": "oom" if is_oom else "failed", **describe(error)}
    if not is_oom and watch.native is not None:
        outcome["computed_reads"] = watch.native.computed_reads()
    if is_oom and _outside_allocator(told):
        outcome |= watch.describe_latest()
    elif is_oom and watch.ooms:
        outcome |= watch.ooms[-1]
    return outcome


def describe(error: BaseException) -> dict[str, Any]:
    """Return an exception's message, class and stack."""
    *outer, told = _chain(error)
    above = [frame for each in outer for frame in traceback.extract_tb(each.__traceback__)[:-1]]
    return {
        "message": _message(told),
        "error": type(told).__name__,
        "stack": frames([*above, *traceback.extract_tb(told.__traceback__)]),
    }


def _message(error: BaseException) -> str:
    """Return an error's message in one line, without the stack of another process that it may hold."""
    listed = getattr(error, "errors", None)
    if type(error).__name__ == "ValidationError" and callable(listed):  # pydantic's, whose text shows all arguments
        return "; ".join(map(_invalid, listed())) or type(error).__name__
    lines = str(error).strip().splitlines()
    if any(line.startswith(("Original Traceback", "Traceback (most recent call last)")) for line in lines):
        lines = [lines[0], lines[-1]]
    return " ".join(" ".join(lines).split()) or type(error).__name__


def _invalid(found: Mapping[str, Any]) -> str:
    """Return what pydantic found wrong, after the name of the field if it is one's."""
    told = " ".join(str(found.get("msg", "")).removeprefix("Value error, ").split())
    return ": ".join(filter(None, (".".join(map(str, found.get("loc", ()))), told)))


def ran_out(error: BaseException) -> bool:
    """Return whether the card's memory was too small."""
    return _is_shortage(_chain(error)[-1])


def _chain(error: BaseException) -> list[BaseException]:
    """Return the error and its causes down to a shortage of memory; the error alone if none is one.

    torch's pipelines raise their own error from the one that a stage raised.
    """
    found = [error]
    while not _is_shortage(found[-1]):
        cause = found[-1].__cause__
        if cause is None or cause in found:
            return [error]
        found.append(cause)
    return found


def _is_shortage(error: BaseException) -> bool:
    return type(error).__name__ == "OutOfMemoryError" or _outside_allocator(error)


def is_parted(torch: Any, error: BaseException) -> bool:
    """Return whether this is torch's error of a rank that waited for another, which had ended."""
    kind = getattr(torch.distributed, "DistBackendError", None)
    while kind is not None and not isinstance(error, kind):
        if error.__cause__ is None:
            return False
        error = error.__cause__
    return kind is not None


_WORDS = ("CUDA error: out of memory", "Cuda failure 2 'out of memory'")
"""Messages of CUDA on a card too full for one more context, and of NCCL on one without room for its buffers."""


def _outside_allocator(error: BaseException) -> bool:
    """Return whether memory ran out outside the allocator, which alone raises OutOfMemoryError."""
    return any(words in str(error) for words in _WORDS)


def is_ours(path: str) -> bool:
    """Return whether a file is one of the packages that tonnage puts into a program's process."""
    return not {*OURS}.isdisjoint(path.split(os.sep)[-4:-1])


def frames(stack: Iterable[traceback.FrameSummary]) -> list[str]:
    """Return `file:line function` of each frame that is not ours, outermost first.

    Files are relative to the folder that the program was started in.
    """
    return [
        f"{frame.filename.removeprefix(_STARTED_IN)}:{frame.lineno} {frame.name}"
        for frame in stack
        if not is_ours(frame.filename)
    ]


_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ", "/torch/")
"""Parts of the paths of files that are not the program's own."""


def locate_caller(frame: FrameType | None = None) -> str:
    """Return `file:line` of the innermost frame in the program's own code, or else in a library other than torch.

    Frames inside `frame` are passed over.
    """
    frame, library = frame or sys._getframe(1), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if not is_ours(name) and "/torch/" not in name:
            place = f"{name.removeprefix(_STARTED_IN)}:{frame.f_lineno}"
            if not any(part in name for part in _LIBRARIES):
                return place
            library = library or place
        frame = frame.f_back
    return library


def hear_uncaught(watch: Any, store: dict[str, Any]) -> None:
    """Chain into sys.excepthook to put the outcome of an uncaught exception into `store`."""
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _stop_if_done(watch, error)
        store.update(of_exception(error, watch))
        shown(kind, error, trace)

    sys.excepthook = hook


def _stop_if_done(watch: Any, error: BaseException) -> None:
    """End a rank that has made its steps and fails only because it waits for one that was stopped after its own.

    A pipeline's first stage is stopped where its next forward begins, while the others wait for what it sends.
    """
    if (watch.is_done() or watch.loops.is_over) and is_parted(watch.torch, error):
        watch.on_end()


def hear_spawned(torch: Any, watch: Any, store: dict[str, Any]) -> None:
    """Put outcomes into `store` also in processes of multiprocessing, which catches their exceptions."""

    def hearing(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def heard(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                _stop_if_done(watch, error)
                store.update(of_exception(error, watch))
                raise

        return heard

    BaseProcess.run = hearing(BaseProcess.run)  # type: ignore[method-assign]
    spawning = torch.multiprocessing.spawn.__globals__  # the module, which has the function's name
    wrap = spawning["_wrap"]

    @functools.wraps(wrap)
    def _wrap(function: Callable[..., Any], *rest: Any) -> Any:
        return wrap(hearing(function), *rest)

    spawning["_wrap"] = _wrap
