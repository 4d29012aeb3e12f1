"""Keeps compiled kernels in the folders of the run's environment, even if the program's own code names another.

A ghost's kernels are chosen without measured times: a real run must not find them.
"""

import functools
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from tonnage_recorder.imports import after_import

_KEYED = ("triton.runtime.cache", "triton.compiler.compiler")
"""Modules that have the function for Triton's key: since 3.5, and up to 3.4."""

_DECIDING = ("compiler", "backends", "runtime", "language", "_C")
"""Folders of Triton from whose files it computes that key."""

_CODE = (".py", ".so")

_PLACES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "USE_PYTORCH_KERNEL_CACHE")


def keep_apart(environment: Mapping[str, str]) -> None:
    """Use the folders in `environment`, the variables that the process was started with, from now on."""
    folders = {name: environment[name] for name in _PLACES if name in environment}

    def patch(module: ModuleType) -> None:
        original = module.cache_dir

        @functools.wraps(original)
        def cache_dir() -> str:
            os.environ.update(folders)
            return str(original())

        module.cache_dir = cache_dir  # type: ignore[attr-defined]

    after_import("torch._inductor.runtime.cache_dir_utils", patch)
    after_import("triton", lambda module: os.environ.update(folders))


def key_by_dates() -> None:
    """Compute Triton's key from its files' sizes and dates from now on.

    Triton computes it from their contents, with a library of some hundred megabytes among them, which takes longer
    than a short run.
    """
    for name in _KEYED:
        after_import(name, _key_by_dates)


def _key_by_dates(module: ModuleType) -> None:
    if not hasattr(module, "triton_key") or module.__file__ is None:
        return
    triton = Path(module.__file__).parents[1]

    @functools.cache
    def triton_key() -> str:
        files = sorted(path for folder in _DECIDING for path in (triton / folder).rglob("*") if path.suffix in _CODE)
        facts = [(str(path), (status := path.stat()).st_size, status.st_mtime_ns) for path in files]
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    module.triton_key = triton_key  # type: ignore[attr-defined]
