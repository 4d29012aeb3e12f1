"""Compiled kernels stay where the environment of the run has them, also where the program's own code names a folder.

What a ghost compiles rests on times that nobody took: a real run must not find it.
"""

import functools
import os
from collections.abc import Mapping
from types import ModuleType

from .imports import after_import

_PLACES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "USE_PYTORCH_KERNEL_CACHE")


def keep_apart(told: Mapping[str, str]) -> None:
    """From now on; `told` is the environment that the process was started with."""
    places = {name: told[name] for name in _PLACES if name in told}

    def patch(module: ModuleType) -> None:
        original = module.cache_dir

        @functools.wraps(original)
        def cache_dir() -> str:
            os.environ.update(places)
            return str(original())

        module.cache_dir = cache_dir  # type: ignore[attr-defined]

    after_import("torch._inductor.runtime.cache_dir_utils", patch)
    after_import("triton", lambda module: os.environ.update(places))
