"""Tokens that a program's own loop generates one after the other: none of them ends a text, as in `generate`.

A token is the maximum of each row or drawn from it, where there are fewer rows than columns.  Nothing is written to
it.  It is noted, as are comparisons of it and flags that are combined from these: "all texts have ended" is False,
and "some text goes on" is True.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import result_sizes

if TYPE_CHECKING:
    from .policy import Policy

_COMPARED = {"eq": False, "__eq__": False, "ne": True, "__ne__": True}
"""Result of comparing a generated token with a number."""
_JOINED = ("__or__", "__ior__", "__and__", "__iand__", "logical_or", "logical_and")
_SUMMED = {"all": False, "any": True}
"""Flags for which each function is replaced, and its result; for others the function itself decides."""


def patch(policy: Policy) -> None:
    """Patch torch for tensors on the card."""
    torch, noted = policy.torch, _Noted()
    wrappers = (
        *((name, functools.partial(_chosen, policy, noted)) for name in ("argmax", "max", "multinomial")),
        *((name, functools.partial(_compared, policy, noted, flag)) for name, flag in _COMPARED.items()),
        *((name, functools.partial(_joined, policy, noted)) for name in _JOINED),
        *((name, functools.partial(_summed, policy, noted, flag)) for name, flag in _SUMMED.items()),
    )
    for owner in (torch, torch.Tensor):
        for name, wrapper in wrappers:
            if owner is torch.Tensor or not name.startswith("__"):
                setattr(owner, name, wrapper(getattr(owner, name)))


class _Noted:
    """Notes on tensors, as long as their memory lives: None for a token, the value of a flag."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Any, bool | None]] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def add(self, tensor: Any, flag: bool | None) -> None:
        storage = tensor.untyped_storage()
        reference = importlib.import_module("torch.multiprocessing.reductions").StorageWeakRef(storage)
        self._of = {address: note for address, note in self._of.items() if not note[0].expired()}
        self._of[storage.data_ptr()] = (reference, flag)

    def of(self, tensor: Any) -> tuple[bool | None] | None:
        """Return what was noted of a tensor, in a tuple; None if nothing was."""
        note = self._of.get(tensor.untyped_storage().data_ptr())
        return None if note is None or note[0].expired() else (note[1],)


def _chosen(policy: Policy, noted: _Noted, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def choose(input: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(input, *args, **kwargs)
        word = result[1] if isinstance(result, tuple) else result
        chosen = result_sizes.is_on_card(policy, word) and not word.is_floating_point() and input.is_floating_point()
        if chosen and word.numel() < input.shape[-1] and policy.known(input) is None:
            noted.add(word, None)
        return result

    return choose


def _compared(policy: Policy, noted: _Noted, flag: bool, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compare(input: Any, other: Any) -> Any:
        result = original(input, other)
        if noted and isinstance(other, int) and result_sizes.is_on_card(policy, input) and noted.of(input) == (None,):
            noted.add(result, flag)
        return result

    return compare


def _joined(policy: Policy, noted: _Noted, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def join(input: Any, other: Any) -> Any:
        result = original(input, other)
        if noted and result_sizes.is_on_card(policy, result):
            notes = [noted.of(each) for each in (input, other) if result_sizes.is_on_card(policy, each)]
            flags = {each[0] for each in notes if each is not None}
            if len(flags) == 1 and None not in flags:
                noted.add(result, flags.pop())
        return result

    return join


def _summed(policy: Policy, noted: _Noted, flag: bool, original: Callable[..., Any]) -> Callable[..., Any]:
    torch = policy.torch

    @functools.wraps(original)
    def total(input: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not noted or not result_sizes.is_on_card(policy, input) or noted.of(input) != (flag,):
            return original(input, *args, **kwargs)
        with policy.covered():
            result = original(input)
        policy.use("generation")
        policy.write(result, torch.tensor(flag))
        return result

    return total
