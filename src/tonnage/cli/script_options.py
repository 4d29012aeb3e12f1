"""A user's own command after two dashes, beside the options of tonnage."""

import os
import shutil
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.errors import UsageError
from tonnage.options import spell_option

if TYPE_CHECKING:
    from tonnage.cluster import Cluster


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


def check_plan_options(stated: dict[str, Any], cluster: "Cluster") -> dict[str, Any]:
    """Return the options that were given for a script.

    Raises UsageError for an option that the script itself sets, and for one that has no effect.
    """
    from tonnage.case import check_unused
    from tonnage.plans import Plan

    of_plan = {item.name for item in fields(Plan)} - {"engine"}
    for name in stated:
        if name not in of_plan:
            raise UsageError(f"--{spell_option(name)} is set by the script itself; change it there.")
    check_unused(stated, Plan(**stated), cluster.gpus, lambda name: name not in stated)
    return stated
