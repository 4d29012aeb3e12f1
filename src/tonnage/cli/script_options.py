"""A user's own command after two dashes, beside the options of tonnage."""

import os
import shutil
from pathlib import Path

from tonnage.errors import UsageError


def is_command(words: list[str], verb: str) -> bool:
    """Return True for a command, which has several words or is an executable file; a model is one word.

    Raises UsageError for several words that begin with no program.
    """
    if len(words) == 1:
        return "/" in words[0] and Path(words[0]).is_file() and os.access(words[0], os.X_OK)
    if shutil.which(words[0]) is None and not Path(words[0]).is_file():
        raise UsageError(
            f"{words[0]!r} is neither a program on PATH nor a file; give one MODEL, or a command after two dashes: "
            f"tonnage {verb} -- python train.py"
        )
    return True
