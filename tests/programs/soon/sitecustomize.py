"""Found by every Python of a test's dry-run: with torch in it, a third of a small one is looking for garbage.

Full collections find nothing in what is imported, and are not made; what dies young is found as ever.  When the
program has come to its end, and the watch has written what it saw, the process ends as it was told to, without the
last looks.
"""

import atexit
import gc
import os
import sys
from typing import Any, NoReturn

_told: list[Any] = [None]
_exit = sys.exit


def _noted(status: Any = None) -> NoReturn:
    _told.append(status)
    _exit(status)


def _leave() -> None:
    status, failed = _told[-1], hasattr(sys, "last_type")
    if "torch" in sys.modules and not failed and (status is None or isinstance(status, int)):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status or 0)


gc.set_threshold(*gc.get_threshold()[:2], 1_000_000)
sys.exit = _noted
atexit.register(_leave)
