"""A user's own command after two dashes, beside the options of tonnage."""

import os
import shutil
from pathlib import Path

from tonnage.errors import UsageError
from tonnage.model import SCRIPT_SUFFIXES


def is_command(words: list[str], verb: str) -> bool:
    """Return True for a command, which has several words or is an executable file; a model is one word.

    Raises UsageError for several words that begin with no program, and for a script that cannot be run as it is.
    """
    if len(words) == 1:
        path = Path(words[0])
        if "/" in words[0] and path.is_file() and os.access(path, os.X_OK):
            return True
        if path.suffix in SCRIPT_SUFFIXES:
            program = "python" if path.suffix == ".py" else "bash"
            way_out = f"run it by its program: tonnage {verb} -- {program} {path}"
            raise UsageError(f"{path} {f'cannot be executed; {way_out}' if path.is_file() else 'does not exist.'}")
        return False
    if shutil.which(words[0]) is None and not Path(words[0]).is_file():
        raise UsageError(
            f"{words[0]!r} is neither a program on PATH nor a file; give one MODEL, or a command after two dashes: "
            f"tonnage {verb} -- python train.py"
        )
    return True
