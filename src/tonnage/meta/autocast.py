"""torch.autocast for fake tensors of a GPU: torch's own lists of operations, and its cache of cast weights.

torch's C++ casts what is on a CUDA device by `Tensor::device`, which for these fake tensors says `meta`.  So the
operations of its lists get kernels of their own under the key AutocastCUDA, as long as the GPU is present.  This
repeats ATen/autocast_mode.h and .cpp; the lists are in `meta.json`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

Cast = Callable[[torch.Tensor], torch.Tensor]


class _CastCache:
    """Casts of fp32 weights, each made once until the outermost autocast ends."""

    def __init__(self) -> None:
        self._casts: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def clear(self) -> None:
        """Forget all casts: the outermost autocast has ended."""
        self._casts.clear()

    def to(self, dtype: torch.dtype) -> Cast:
        """Return a function that casts to a dtype as autocast does; fp64, integers and tensors on other devices
        stay.
        """

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            if not _is_eligible(tensor) or tensor.dtype == dtype:
                return tensor
            if not self._is_cached(tensor, dtype):
                return tensor.to(dtype)
            source, cached = self._casts.get(id(tensor), (None, None))
            if source is None or source() is not tensor or cached is None:
                cached = tensor.to(dtype)
                self._casts[id(tensor)] = weakref.ref(tensor), cached
            return cached

        return cast

    @staticmethod
    def _is_cached(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
        lower = bool(dtype == torch.get_autocast_dtype("cuda")) and torch.is_autocast_cache_enabled()
        weight = bool(tensor.dtype == torch.float32) and tensor.requires_grad and tensor.is_leaf
        return lower and weight and not tensor._is_view()


def _is_eligible(tensor: torch.Tensor) -> bool:
    return bool(tensor.device.type == "cuda") and tensor.is_floating_point() and tensor.dtype != torch.float64


@contextmanager
def on_card(lists: Mapping[str, list[str]]) -> Iterator[None]:
    """Make autocast cast what is on the GPU; `lists` has the operations of each rule of `_RULES`."""
    library = torch.library.Library("aten", "IMPL")
    weights = _CastCache()
    forget = torch.clear_autocast_cache

    def clear() -> None:
        weights.clear()
        forget()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # replacing torch's own kernels is the purpose
        for rule, names in lists.items():
            for op, name in ((_find_overload(name), name) for name in names):
                if op is not None:
                    kernel = _without_autocast(_RULES[rule](op, weights))
                    library.impl(name, kernel, "AutocastCUDA", allow_override=True)
    try:
        with patch.object(torch, "clear_autocast_cache", clear):
            yield
    finally:
        library._destroy()


def _find_overload(name: str) -> Any:
    """Return the operation of torch.ops.aten; None if this version does not have it."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _without_autocast(kernel: Callable[..., Any]) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)

    def called(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return kernel(*args, **kwargs)

    return called


def _cast_all(cast: Cast, args: Any, kwargs: Any) -> Any:
    """Return the arguments, cast from the last to the first, as the compilers of torch for Linux evaluate them."""
    kwargs = tree_map_only(torch.Tensor, cast, kwargs)
    return [tree_map_only(torch.Tensor, cast, argument) for argument in reversed(args)][::-1], kwargs


def _lower_precision(op: Any, weights: _CastCache) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _cast_all(weights.to(torch.get_autocast_dtype("cuda")), args, kwargs)
        return op(*args, **kwargs)

    return kernel


def _fp32(op: Any, weights: _CastCache) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _cast_all(weights.to(torch.float32), args, kwargs)
        return op(*args, **kwargs)

    return kernel


def _fp32_result(op: Any, weights: _CastCache) -> Callable[..., Any]:
    """Return the kernel with fp32 results unless the program gives a dtype; the operation casts by itself."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if _is_eligible(args[0]) and kwargs.get("dtype") is None and not _has_positional_dtype(op, args):
            kwargs["dtype"] = torch.float32
        return op(*args, **kwargs)

    return kernel


def _has_positional_dtype(op: Any, args: Any) -> bool:
    """Return True if the operation's dtype was given by position."""
    names = [argument.name for argument in op._schema.arguments if not argument.kwarg_only]
    place = names.index("dtype") if "dtype" in names else len(args)
    return place < len(args) and args[place] is not None


def _widest(op: Any, weights: _CastCache) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        wide = any(_is_eligible(tensor) and tensor.dtype == torch.float32 for tensor in tensors)
        cast = weights.to(torch.float32 if wide else torch.get_autocast_dtype("cuda"))
        args, kwargs = _cast_all(cast, args, kwargs)
        return op(*args, **kwargs)

    return kernel


_RULES: Mapping[str, Callable[[Any, _CastCache], Callable[..., Any]]] = {
    "lower_precision_fp": _lower_precision,
    "fp32": _fp32,
    "fp32_set_opt_dtype": _fp32_result,
    "promote": _widest,
}
"""The kernel that each of torch's lists needs, by its name in autocast_mode.h."""
