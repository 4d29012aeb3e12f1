"""Results of conditions on computed tensors: finite, equal, true everywhere, true somewhere, and how often."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from .integers import MOST_BYTES, of_compiler
from .policy import BIG_ELEMENTS, Policy


class _Nowhere:
    """Masks that are false everywhere: nothing is written to them, but their count is known to be zero."""

    def __init__(self) -> None:
        self._live: dict[int, Any] = {}

    def note(self, mask: Any) -> None:
        """Remember a new mask as long as its memory lives."""
        storage = mask.untyped_storage()
        reductions = importlib.import_module("torch.multiprocessing.reductions")
        self._live = {address: reference for address, reference in self._live.items() if not reference.expired()}
        self._live[storage.data_ptr()] = reductions.StorageWeakRef(storage)

    def holds(self, mask: Any) -> bool:
        """Return whether a mask is false everywhere."""
        reference = self._live.get(mask.untyped_storage().data_ptr()) if self._live else None
        return reference is not None and not reference.expired()


def patch(policy: Policy) -> None:
    """Patch torch's conditions for tensors on the card."""
    nowhere = _Nowhere()
    _patch_finite(policy)
    _patch_sums(policy, nowhere)
    _patch_all(policy)
    _patch_equal(policy)
    _patch_comparisons(policy, nowhere)
    _patch_checks(policy)


def _patch_finite(policy: Policy) -> None:
    torch, original = policy.torch, policy.torch.isfinite

    @functools.wraps(original)
    def isfinite(input: Any) -> Any:
        result = original(input)
        if torch.compiler.is_compiling() or not isinstance(result, torch.Tensor) or not result.is_cuda:
            return result
        policy.use("finite")
        return policy.filled(result, torch.ones(result.shape, dtype=torch.bool, device="cpu"))

    torch.isfinite = isfinite
    torch.Tensor.isfinite = isfinite
    for name in ("isnan", "isinf"):
        for owner in (torch, torch.Tensor):
            setattr(owner, name, _never(policy, getattr(owner, name)))


def _never(policy: Policy, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an element-wise predicate that is false everywhere, also for a program that counts its results."""
    torch = policy.torch

    @functools.wraps(original)
    def asked(input: Any) -> Any:
        result = original(input)
        if torch.compiler.is_compiling() or not policy.is_plain(result):
            return result
        small = result.is_cuda and result.numel() <= BIG_ELEMENTS
        if small and not torch.cuda.is_current_stream_capturing():
            policy.write(result, torch.zeros(result.shape, dtype=torch.bool))
        return result

    return asked


def _patch_sums(policy: Policy, nowhere: _Nowhere) -> None:
    for owner in (policy.torch, policy.torch.Tensor):
        owner.sum = _counted(policy, nowhere, owner.sum)


def _counted(policy: Policy, nowhere: _Nowhere, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a sum that is correct for a mask that is known, follows a rule or is false everywhere."""
    torch = policy.torch

    @functools.wraps(original)
    def total(input: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(input, *args, **kwargs)
        if torch.compiler.is_compiling() or not policy.is_plain(input) or not input.is_cuda:
            return result
        following = policy.following(input)
        if following is not None:
            if input.nbytes <= MOST_BYTES:
                policy.write(result, original(following(), *args, **kwargs))
            return result
        if input.dtype != torch.bool or result.numel() > BIG_ELEMENTS:
            return result
        if nowhere.holds(input):
            policy.use("exact")
            policy.write(result, torch.zeros(result.shape, dtype=result.dtype))
        elif not args and not kwargs and input.numel() <= BIG_ELEMENTS:
            values = policy.known(input)
            if values is not None:
                policy.write(result, original(values))
        return result

    return total


def _patch_all(policy: Policy) -> None:
    torch = policy.torch

    def patched(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def everywhere(input: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(input, *args, **kwargs)
            if args or kwargs or torch.compiler.is_compiling():
                return result
            if not isinstance(result, torch.Tensor) or not result.is_cuda:
                return result
            values = policy.read(input)
            if values is None:
                policy.use("all")
            return policy.filled(result, torch.tensor(values is None or bool(values.all()), device="cpu"))

        return everywhere

    torch.all = patched(torch.all)
    torch.Tensor.all = patched(torch.Tensor.all)
    torch._is_all_true = patched(torch._is_all_true)  # used by torch.distributions to check parameters


def _patch_equal(policy: Policy) -> None:
    """Compare two tensors whose values are known; others are unequal, as without this patch."""
    torch, original = policy.torch, policy.torch.equal

    @functools.wraps(original)
    def equal(input: Any, other: Any) -> Any:
        result = original(input, other)
        plain = type(input) is torch.Tensor and type(other) is torch.Tensor
        if not plain or not input.is_cuda or max(input.numel(), other.numel()) > BIG_ELEMENTS:
            return result  # a sign for one, where torch.fx traces
        values, others = policy.read(input), policy.read(other)
        return bool(result if values is None or others is None else original(values, others))

    torch.equal = equal


def _patch_comparisons(policy: Policy, nowhere: _Nowhere) -> None:
    """Make the mask known if token ids from the host are compared with a number: image places, padding."""
    torch = policy.torch

    def patched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compared(input: Any, other: Any) -> Any:
            result = original(input, other)
            if (
                torch.compiler.is_compiling()
                or not isinstance(other, int | float)
                or not isinstance(input, torch.Tensor)
                or not input.is_cuda
            ):
                return result
            if type(input) is torch.Tensor and input.is_floating_point() and name == "eq":
                if policy.is_plain(input) and policy.known(input) is None:
                    nowhere.note(result)
                return result
            if not isinstance(other, int):
                return result
            if type(input) is torch.Tensor and not input.is_floating_point():
                values = policy.read(input)
                if values is not None:
                    policy.write(result, original(values, other))
            return result

        return compared

    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        for owner, alias in ((torch, name), (torch.Tensor, name), (torch.Tensor, f"__{name}__")):
            setattr(owner, alias, patched(name, getattr(owner, alias)))
    torch.greater = patched("gt", torch.greater)


def _patch_checks(policy: Policy) -> None:
    """Let `torch._check_tensor_all` pass for a condition that was computed, as it does for valid data."""
    torch = policy.torch
    original = getattr(torch, "_check_tensor_all_with", None)
    if original is None:
        return

    @functools.wraps(original)
    def check(error: Any, condition: Any, message: Any = None) -> None:
        if isinstance(condition, torch.Tensor) and condition.is_cuda:
            # In a graph, torch's own check would read the value when the graph is run.
            values = None if of_compiler(condition) else policy.read(condition)
            if values is None:
                policy.use("checks")
                return
            condition = values
        original(error, condition, message)

    torch._check_tensor_all_with = check
