"""Access to the recorder's modules, which processes without tonnage import under the same name."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

from tonnage.ghost.environment import RECORDER


@functools.cache
def inside(name: str) -> Any:
    """Return a module of `tonnage_recorder`, whose folder goes on the path."""
    if str(RECORDER) not in sys.path:
        sys.path.append(str(RECORDER))
    return importlib.import_module(f"tonnage_recorder.{name}")
