"""Patches of torch and transformers, so that a step on fake tensors runs as one on real tensors does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from tonnage.meta.recorder import Recorder


@contextmanager
def memory_outside_dispatcher(recorder: Recorder) -> Iterator[None]:
    """Record two sources of memory that no operation shows: resizing a storage, and the state of the random
    numbers.
    """
    resize, get_rng_state = torch.UntypedStorage.resize_, torch.get_rng_state

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        recorder.resized(storage)
        return result

    def rng_state() -> torch.Tensor:
        state = get_rng_state()
        recorder.see(state)
        return state

    torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
    torch.get_rng_state = rng_state
    try:
        yield
    finally:
        torch.UntypedStorage.resize_, torch.get_rng_state = resize, get_rng_state  # type: ignore[method-assign]


@contextmanager
def sharding_propagation(recorder: Recorder) -> Iterator[None]:
    """Ignore DTensor's own fake tensors, by which it finds the shapes of results."""
    name = "_propagate_tensor_meta_non_cached"
    propagate = getattr(ShardingPropagator, name, None)
    if propagate is None:
        yield
        return

    @functools.wraps(propagate)
    def propagate_unrecorded(*arguments: Any, **options: Any) -> Any:
        with recorder.paused():
            return propagate(*arguments, **options)

    setattr(ShardingPropagator, name, propagate_unrecorded)
    try:
        yield
    finally:
        setattr(ShardingPropagator, name, propagate)


@contextmanager
def module_conversions() -> Iterator[None]:
    """Make `Module.to` and `to_empty` change fake parameters as they change real ones.

    torch would swap fake ones with their successors, which it refuses for tensors that have weak references.
    """
    original = torch.nn.Module._apply

    def apply(module: torch.nn.Module, change: Callable[[Any], Any], recurse: bool = True) -> torch.nn.Module:
        for child in module.children() if recurse else ():
            child._apply(change)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = _convert(parameter, change)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = change(buffer)
        return module

    torch.nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module._apply = original  # type: ignore[method-assign]


def _convert(parameter: torch.nn.Parameter, change: Callable[[Any], Any]) -> torch.nn.Parameter:
    """Return the parameter after a change of dtype or device: itself with new memory, or a new one on another
    device.
    """
    with torch.no_grad():
        value = change(parameter)
    if is_traceable_wrapper_subclass(value):  # a shard; torch swaps real ones too
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(value, parameter.requires_grad))
    elif value.device == parameter.device:
        parameter.data = value
        if parameter.grad is not None:
            parameter.grad.data = change(parameter.grad)
    else:
        return torch.nn.Parameter(value, parameter.requires_grad)
    return parameter


@contextmanager
def hidden_fake_tensors() -> Iterator[None]:
    """Hide from transformers that tensors are fake, because it takes other paths then."""
    from transformers.utils import import_utils

    original = getattr(import_utils, "is_fake_tensor", None)
    if original is None:  # older transformers does not check
        yield
        return
    import_utils.is_fake_tensor = lambda value: False
    try:
        yield
    finally:
        import_utils.is_fake_tensor = original
