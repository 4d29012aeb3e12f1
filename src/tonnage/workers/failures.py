"""What a worker says of a step that failed: one of our errors, in one line."""

import errno
import os
import signal
import tempfile
from typing import Any, Final

import torch

from tonnage.errors import CannotEstimate, GhostUnavailable, TonnageError

_LAST_FOR_VOLTA: Final = "2.10.0"
"""The last torch whose plain wheel has kernels for capability 7.0: the next is made by CUDA 13, which has none."""


def answer(error: TonnageError) -> dict[str, Any]:
    """The answer for it."""
    return {"error": str(error), "kind": type(error).__name__}


def died(status: int) -> CannotEstimate:
    """What is said of a child that ended without a word; `status` as `os.waitpid` tells it."""
    reason = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {status >> 8}"
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    why = "; the system kills processes so when this machine's memory is used up" if killed else ""
    return CannotEstimate(f"The process that ran the step died ({reason}{why}).")


def told(error: BaseException) -> TonnageError:
    """What is said of whatever a step may raise."""
    if isinstance(error, TonnageError):
        return error
    if isinstance(error, ImportError) and "'transformers" in str(error):
        import transformers

        lacking = error.msg.partition(" (")[0]  # behind it comes a path
        version = transformers.__version__
        return CannotEstimate(f"transformers {version} does not have what was asked for ({lacking}); upgrade it.")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = error.filename or os.path.dirname(tempfile.gettempdir())  # which is a folder of tonnage's
        return CannotEstimate(
            f"No space is left on the device of {where}; free some, or set TMPDIR to a folder elsewhere."
        )
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return CannotEstimate("Files may not be as large as one that is needed here (ulimit -f says how large).")
    if "CUDA error: invalid device function" in str(error):
        return without_kernels()
    words = [f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"]
    if error.__cause__ is not None and str(error.__cause__) not in str(error):  # a pipeline's says where, not what
        words.append(f"{type(error.__cause__).__name__}: {' '.join(str(error.__cause__).split())[:600]}")
    return CannotEstimate(f"The step failed: {'; because of '.join(words)}")


def without_kernels() -> CannotEstimate:
    """That this torch has no kernel of a kind for the card; where it has none at all, no plan would have them."""
    made_for = torch.cuda.get_arch_list()
    said = f"torch {torch.__version__} has no kernels for this card, only for {', '.join(made_for)}; "
    major, minor = torch.cuda.get_device_capability()
    runs = {f"sm_{major}{earlier}" for earlier in range(minor + 1)}
    return (CannotEstimate if runs & set(made_for) else GhostUnavailable)(said + _torch_for_old_cards())


def _torch_for_old_cards() -> str:
    """What to type where a torch has no kernels for a card."""
    if torch.cuda.get_device_capability() == (7, 0) and torch.version.cuda >= "13":
        return f"the last that has is --torch {_LAST_FOR_VOLTA}."
    return "try another --torch."
