"""Choices of experts by computed scores: with a balanced router all experts are chosen equally often.

The k choices of row r are k r, k r + 1, ... modulo the number of experts.  Nothing is written to them: the rule is
kept beside the tensor, and beside masks that are made of it.  Counts, comparisons and indexing by them get the values
that follow from the rule; the choices themselves read as zero, as all computed values do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import result_sizes
from .integers import KNOWN_BYTES, MOST_BYTES

if TYPE_CHECKING:
    from .policy import Policy

_COUNTS = ("any", "bincount", "cumsum", "histc", "index_add", "index_add_", "max", "scatter_add", "scatter_add_")
"""Functions whose small results are written to the card: `tolist` reads them there."""
_OF_KNOWN = ("any", "cumsum", "max")
"""Functions among these that also apply to small known integers, such as the counts."""
_MASKS = ("scatter", "scatter_", "bool", "int", "long", "contiguous")
"""Functions whose results follow a rule."""


def patch(policy: Policy) -> None:
    """Patch torch for tensors on the card."""
    torch = policy.torch
    for owner in (torch, torch.Tensor):
        owner.topk = _several(policy, owner.topk)
        owner.max = _one(policy, owner.max)
        owner.argmax = _one(policy, owner.argmax)
        for name in (*_COUNTS, *_MASKS):
            if callable(getattr(owner, name, None)) and not isinstance(getattr(owner, name), torch.dtype):
                setattr(owner, name, _followed(policy, name, getattr(owner, name)))
    torch.nn.functional.one_hot = _encoded(policy, torch.nn.functional.one_hot)


def _in_turn(count: int) -> Callable[[Any], Any]:
    """Return the rule by which the choices among `count` experts go round."""
    return lambda offset: offset % count


def _several(policy: Policy, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def topk(input: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(input, *args, **kwargs)
        if result_sizes.is_on_card(policy, input):
            dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            if input.ndim and dim in (-1, input.ndim - 1) and policy.known(input) is None:
                policy.follow(result[1], _in_turn(input.shape[-1]))
        return result

    return topk


def _one(policy: Policy, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with balanced choices for the maximum of each row, if rows are as many as columns or more.

    Fewer rows are not the tokens of a router, but the next words of some texts, among a whole vocabulary.
    """

    @functools.wraps(original)
    def largest(input: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(input, *args, **kwargs)
        dim = kwargs.get("dim", args[0] if args else None)
        if not isinstance(dim, int) or not result_sizes.is_on_card(policy, input) or not input.ndim:
            return result
        chosen, count = result[1] if isinstance(result, tuple) else result, input.shape[-1]
        if dim in (-1, input.ndim - 1) and chosen.numel() >= count > 0 and policy.known(input) is None:
            policy.follow(chosen, _in_turn(count))
        return result

    return largest


def _encoded(policy: Policy, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def one_hot(tensor: Any, num_classes: int = -1) -> Any:
        if num_classes < 0 and result_sizes.is_on_card(policy, tensor):
            num_classes = result_sizes.count_classes(policy, tensor) or num_classes
        result = original(tensor, num_classes)
        if result_sizes.is_on_card(policy, result) and tensor.is_contiguous():
            classes, start = result.shape[-1], tensor.storage_offset()
            rule = policy.rule(tensor) or (_in_turn(classes) if policy.known(tensor) is None else None)
            if rule is not None:
                policy.follow(result, lambda offset: rule(offset // classes + start) == offset % classes)
        return result

    return one_hot


def _followed(policy: Policy, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with results from choices or masks of them, computed on the host when needed."""

    @functools.wraps(original)
    def operation(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        if not any(_says_something(policy, name, each) for each in given):
            return original(*args, **kwargs)
        asked = [_later(policy, each) for each in given]  # before the operation, which may write there
        if name.startswith(("scatter", "index_add")):
            asked = [
                each or _filled(policy, value, index)
                for index, (each, value) in enumerate(zip(asked, given, strict=True))
            ]
        result = original(*args, **kwargs)
        if any(each is None for each in asked) or not result_sizes.is_on_card(policy, result):
            return result

        positional, named = len(args), tuple(kwargs)  # tensors that `values` refers to would live as long as its rule

        @functools.cache
        def values() -> Any:
            arguments = [each() for each in asked if each is not None]
            if name == "histc":  # which the host has for floating-point numbers only
                arguments[0] = arguments[0].double()
            return original(*arguments[:positional], **dict(zip(named, arguments[positional:], strict=True)))

        if name in _COUNTS:
            if result.nbytes <= KNOWN_BYTES:
                policy.write(result, values())
        elif policy.rule(result) is None and result.nbytes == result.untyped_storage().nbytes():
            policy.follow(result, functools.partial(_looked_up, _laid_out(policy, result, values)))
        return result

    return operation


def _says_something(policy: Policy, name: str, value: Any) -> bool:
    """Return whether an argument is a tensor that follows a rule, or known integers to which `name` applies."""
    if not isinstance(value, policy.torch.Tensor) or not result_sizes.is_on_card(policy, value):
        return False
    if policy.rule(value) is not None:
        return bool(value.nbytes <= MOST_BYTES)
    small = name in _OF_KNOWN and not value.dtype.is_floating_point and 0 < value.nbytes <= KNOWN_BYTES
    return small and policy.known(value) is not None


def _later(policy: Policy, value: Any) -> Callable[[], Any] | None:
    """Return a function that returns this argument on the host; None if it is not known and has no rule."""
    if not isinstance(value, policy.torch.Tensor):
        return lambda: value
    if not result_sizes.is_on_card(policy, value) or value.nbytes > MOST_BYTES:
        return None
    known = policy.known(value)
    if known is not None:
        return lambda: known
    return policy.following(value)


def _filled(policy: Policy, value: Any, index: int) -> Callable[[], Any] | None:
    """Return the values with which kernels filled an argument of a count: counts with zero, integers with one."""
    if value.nbytes > MOST_BYTES or (index > 0 and value.is_floating_point()):
        return None
    return functools.partial(policy.torch.full, value.shape, int(index > 0), dtype=value.dtype)


def _laid_out(policy: Policy, result: Any, values: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that returns the values in the order of the result's memory."""
    torch, shape, strides, count = policy.torch, result.shape, result.stride(), result.numel()

    @functools.cache
    def flat() -> Any:
        memory = torch.empty(count, dtype=values().dtype)
        torch.as_strided(memory, shape, strides).copy_(values())
        return memory

    return flat


def _looked_up(flat: Callable[[], Any], offsets: Any) -> Any:
    return flat()[offsets]
