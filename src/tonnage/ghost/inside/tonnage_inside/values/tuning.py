"""Triton's autotuner compiles a kernel in every form it is given and takes the fastest: here all take no time.

The first that compiles is the one that it would take; the others, of which there may be a hundred, are left out.
Inductor times its forms too, on copies of what a kernel writes, and keeps on disk which was fastest: it times them in
every run here, as on a machine that runs a program for the first time, so that a second run gives the same figures.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .policy import Policy

_SLOW = [float("inf")] * 3
"""What the autotuner writes down of a form that cannot run: the median and two quantiles of its seconds."""


def patch(_policy: Policy, module: ModuleType) -> None:
    """Of `triton.runtime.autotuner`."""
    kind = module.Autotuner
    measure, prune = kind._bench, kind.prune_configs

    @functools.wraps(prune)
    def prune_configs(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        tuner.tonnage_found = False
        return prune(tuner, *args, **kwargs)

    @functools.wraps(measure)
    def bench(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(tuner, "tonnage_found", False):
            return _SLOW
        took = measure(tuner, *args, **kwargs)
        tuner.tonnage_found = took != _SLOW
        return took

    kind.prune_configs, kind._bench = prune_configs, bench


def patch_inductor(_policy: Policy, module: ModuleType) -> None:
    """Of `torch._inductor.config`."""
    if hasattr(module, "autotune_local_cache"):
        module.autotune_local_cache = False  # type: ignore[attr-defined]
