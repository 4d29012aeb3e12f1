"""Access to the modules that run inside a ghost's process."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

from tonnage.ghost.process import INSIDE


@functools.cache
def inside(name: str) -> Any:
    """Return a module of `tonnage_inside`, which is alone on the path in a ghost's process."""
    if str(INSIDE) not in sys.path:
        sys.path.append(str(INSIDE))
    return importlib.import_module(f"tonnage_inside.{name}")
