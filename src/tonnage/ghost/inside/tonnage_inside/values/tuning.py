"""Autotuning without times: Triton's autotuner takes the first form of a kernel that compiles.

It would compile each form, of which there may be a hundred, and take the fastest; here all take no time, so the rest
are left out.  Inductor times its forms too, on copies of what a kernel writes, and keeps the fastest on disk: here it
times them in every run, as on a machine that runs a program for the first time, so that a second run gives the same
figures.  With `max-autotune` it would compile hundreds: the first form of each kernel is taken.
"""

from __future__ import annotations

import functools
import inspect
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


def patch_selection(_policy: Policy, module: ModuleType) -> None:
    """Patch `torch._inductor.select_algorithm`: of several kernels for a product or convolution take the first."""
    kind = module.AlgorithmSelectorCache  # type: ignore[attr-defined]
    original = kind.__call__

    @functools.wraps(original)
    def select(cache: Any, name: Any, choices: Any, *args: Any, **kwargs: Any) -> Any:
        return original(cache, name, [each for each in choices if each is not None][:1], *args, **kwargs)

    kind.__call__ = select


def patch_descent(_policy: Policy, module: ModuleType) -> None:
    """Patch `torch._inductor.runtime.coordinate_descent_tuner`: a kernel's first form is not improved."""
    module.CoordescTuner.autotune = lambda tuner, function, baseline, *args, **kwargs: baseline  # type: ignore[attr-defined]


def patch_forms(_policy: Policy, module: ModuleType) -> None:
    """Patch `torch._inductor.runtime.triton_heuristics`: with `max-autotune` a kernel has its first form only."""
    kind = module.CachingAutotuner  # type: ignore[attr-defined]
    original = kind.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def begin(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        meta = given.get("inductor_meta") or {}
        if meta.get("max_autotune") or meta.get("max_autotune_pointwise"):
            given["configs"] = list(given["configs"])[:1]
        original(**given)

    kind.__init__ = begin
