"""Autotuning without times: Triton's autotuner takes the first form of a kernel that compiles.

It would compile each form, of which there may be a hundred, and take the fastest; here all take no time, so the rest
are left out.  Inductor times its forms too, on copies of what a kernel writes, and keeps the fastest on disk: here it
times them in every run, as on a machine that runs a program for the first time, so that a second run gives the same
figures.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .policy import Policy

_SLOW = [float("inf")] * 3
"""Times that the autotuner notes for a form that cannot run: the median and two quantiles of its seconds."""


def patch(_policy: Policy, module: ModuleType) -> None:
    """Patch `triton.runtime.autotuner`."""
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
    """Patch `torch._inductor.config`."""
    if hasattr(module, "autotune_local_cache"):
        module.autotune_local_cache = False  # type: ignore[attr-defined]
