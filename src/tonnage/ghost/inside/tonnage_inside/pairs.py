"""A block that a program gives back is taken at once, unless another stream may still work on it.

The allocator writes down both; where all blocks are taken at once, only that they are given back has to be noted and
read, a third less.  A block that is waited for has an event recorded on the other stream, which the ghost notices.
"""

from array import array
from typing import Any

import numpy as np

from .records import EVENT, RECORD
from .written import ACTIONS

TAKEN = "free_completed"
"""What the allocator then need not write down (torch 2.11 and later can leave it out)."""


class Uncertain(Exception):
    """A block may have been waited for, and nothing says for how long."""


def both(columns: "dict[str, array[int]]", native: Any) -> "dict[str, array[int]]":
    """The events with those that were left out, each behind that of its block being given back.

    Raises Uncertain where the ghost noticed that an event was recorded.
    """
    if EVENT in native.log_bytes()[:: RECORD.itemsize]:
        raise Uncertain
    given_back = np.frombuffer(columns["action"], dtype=np.int64) == ACTIONS["free_requested"]
    found = {
        name: np.repeat(np.frombuffer(column, dtype=np.int64), 1 + given_back) for name, column in columns.items()
    }
    found["action"][np.flatnonzero(found["action"] == ACTIONS["free_requested"])[1::2]] = ACTIONS[TAKEN]
    return {name: array("q", column.tobytes()) for name, column in found.items()}
