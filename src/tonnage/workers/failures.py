"""Errors of a worker for steps that failed: each one of tonnage's errors, in one line."""

import errno
import os
import signal
import tempfile
import traceback
from pathlib import Path
from typing import Any, Final

import torch

from tonnage.errors import CannotEstimate, GhostUnavailable, TonnageError

_LAST_FOR_VOLTA: Final = "2.10.0"
"""Last torch whose default wheel has kernels for capability 7.0: the next is built with CUDA 13, which has none."""


def answer(error: TonnageError) -> dict[str, Any]:
    """Return the answer of a worker for an error."""
    return {"error": str(error), "kind": type(error).__name__}


def explain_death(status: int) -> CannotEstimate:
    """Return the error for a child that ended without a reply; `status` is that of `os.waitpid`."""
    reason = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {status >> 8}"
    is_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    cause = "; the system sends it when this machine's memory is used up" if is_killed else ""
    return CannotEstimate(f"The process that ran the step died ({reason}{cause}).")


def explain(error: BaseException) -> TonnageError:
    """Return the error of tonnage for any exception that a step may raise."""
    if isinstance(error, TonnageError):
        return error
    if isinstance(error, ImportError) and "'transformers" in str(error):
        import transformers

        lacking = error.msg.partition(" (")[0]  # behind it comes a path
        version = transformers.__version__
        return CannotEstimate(f"transformers {version} lacks a class that the step needs ({lacking}); upgrade it.")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        # TMPDIR is a folder of tonnage's in the user's; tempfile would name another one, as this is full.
        where = error.filename or os.path.dirname(os.environ.get("TMPDIR") or tempfile.gettempdir())
        return CannotEstimate(
            f"No space is left on the device of {where}; free some, or set TMPDIR to a folder elsewhere."
        )
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return CannotEstimate(
            "A file that is needed here is larger than the limit for files; raise it with ulimit -f."
        )
    if "CUDA error: invalid device function" in str(error):
        return explain_missing_kernels()
    sentences = [_describe(error)]
    if error.__cause__ is not None and str(error.__cause__) not in str(error):  # a pipeline's says where, not what
        sentences.append(_describe(error.__cause__))
    return CannotEstimate(f"The step failed: {'; because of '.join(sentences)}")


def _describe(error: BaseException) -> str:
    """Return an exception in one line: its message, and without one the line of code that raised it."""
    words = " ".join(str(error).split())[:600]
    if words:
        return f"{type(error).__name__}: {words}"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return type(error).__name__
    place = "/".join(Path(frames[-1].filename).parts[-2:])
    condition = f", where {frames[-1].line}" if isinstance(error, AssertionError) and frames[-1].line else ""
    return f"{type(error).__name__} in {place}, line {frames[-1].lineno}{condition}"


def explain_missing_kernels() -> CannotEstimate:
    """Return the error for a kernel that this torch lacks for the card.

    It is GhostUnavailable if torch has no kernels at all for the card, so that no plan can run.
    """
    architectures = torch.cuda.get_arch_list()
    message = f"torch {torch.__version__} has no kernels for this card, only for {', '.join(architectures)}; "
    major, minor = torch.cuda.get_device_capability()
    compatible = {f"sm_{major}{earlier}" for earlier in range(minor + 1)}
    kind = CannotEstimate if compatible & set(architectures) else GhostUnavailable
    return kind(message + _suggest_torch())


def _suggest_torch() -> str:
    """Return the option to use if a torch has no kernels for a card."""
    if torch.cuda.get_device_capability() == (7, 0) and torch.version.cuda >= "13":
        return f"the last version with kernels for it is --torch {_LAST_FOR_VOLTA}."
    return "try another --torch."
