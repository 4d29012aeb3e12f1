"""Operations whose values decide the size of their result, or whether they raise an error.

torch counts on the card and reads the count, which is zero on a ghost: a sparse gradient would have no rows.  The
operations themselves are run all the same, for the memory that they allocate on the way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .policy import Policy


def patch(policy: Policy) -> None:
    """Patch torch for tensors on the card."""
    torch = policy.torch
    for name in ("unique", "unique_consecutive"):
        setattr(torch, name, _distinct(policy, getattr(torch, name)))
    for owner in (torch, torch.Tensor):
        owner.bincount = _counted(policy, owner.bincount)
        owner.repeat_interleave = _repeated(policy, owner.repeat_interleave)
        owner.allclose = _close(policy, owner.allclose)
    torch.Tensor.coalesce = _coalesced(policy, torch.Tensor.coalesce)
    torch.cuda._lazy_call(functools.partial(_draw_normal, policy))


def count_classes(policy: Policy, tensor: Any) -> int | None:
    """Return the number of classes, from 0 to the largest known one; None if they are computed."""
    values = policy.read(tensor) if tensor.numel() else None
    if values is None:
        policy.use("sized")
        return None
    return int(values.max()) + 1


def is_on_card(policy: Policy, tensor: Any) -> bool:
    """Return whether this is a tensor on the card and no graph is being compiled."""
    return not policy.torch.compiler.is_compiling() and policy.is_plain(tensor) and bool(tensor.is_cuda)


def _distinct(policy: Policy, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with one distinct value among computed ones, which read as zero; rows are all different."""
    torch = policy.torch

    def of_computed(tensor: Any, dim: int | None) -> tuple[Any, Any, Any]:
        policy.use("sized")
        if dim is None:
            values, inverse = tensor.new_zeros(1), torch.zeros_like(tensor, dtype=torch.int64)
            return values, inverse, torch.tensor([tensor.numel()]).to(tensor.device)
        rows = tensor.shape[dim]
        return (
            tensor.clone(),
            torch.arange(rows).to(tensor.device),
            torch.ones(rows, dtype=torch.int64).to(tensor.device),
        )

    @functools.wraps(original)
    def distinct(input: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(input, *args, **kwargs)
        if not is_on_card(policy, input) or not input.numel():
            return result
        values = policy.read(input)
        if values is not None:
            unique = original(values, *args, **kwargs)
            on_card = unique if isinstance(unique, tuple) else (unique,)
            made = tuple(each.to(input.device) for each in on_card)
        else:
            names = ("sorted", "return_inverse", "return_counts", "dim")[original.__name__ != "unique" :]
            given = dict(zip(names, args, strict=False)) | kwargs
            every = zip(
                (True, given.get("return_inverse"), given.get("return_counts")),
                of_computed(input, given.get("dim")),
                strict=True,
            )
            made = tuple(each for wanted, each in every if wanted)
        return made if isinstance(result, tuple) else made[0]

    return distinct


def _counted(policy: Policy, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def bincount(input: Any, weights: Any = None, minlength: int = 0) -> Any:
        if is_on_card(policy, input) and not minlength:
            minlength = count_classes(policy, input) or 0
        return original(input, weights, minlength)

    return bincount


def _repeated(policy: Policy, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with the sum of known repetitions, so that torch need not read it from the card."""
    torch = policy.torch

    @functools.wraps(original)
    def repeat_interleave(input: Any, *args: Any, **kwargs: Any) -> Any:
        repeats = args[0] if args else kwargs.get("repeats", input)
        if isinstance(repeats, torch.Tensor) and is_on_card(policy, repeats) and kwargs.get("output_size") is None:
            values = policy.read(repeats)
            if values is not None and len(args) < 3:
                times = (
                    input.shape[kwargs.get("dim", args[1] if len(args) > 1 else 0) or 0]
                    if repeats.numel() == 1
                    else 1
                )
                kwargs["output_size"] = int(values.sum()) * times
        return original(input, *args, **kwargs)

    return repeat_interleave


def _close(policy: Policy, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that compares known values, and finds computed ones close."""

    @functools.wraps(original)
    def allclose(input: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(input, other, *args, **kwargs)
        if not is_on_card(policy, input):
            return result
        values, others = policy.read(input), policy.read(other)
        if values is not None and others is not None:
            return bool(original(values, others, *args, **kwargs))
        policy.use("checks")
        return True

    return allclose


def _coalesced(policy: Policy, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method with one row for each distinct known index; computed indices are all different."""
    torch = policy.torch

    @functools.wraps(original)
    def coalesce(tensor: Any) -> Any:
        result = original(tensor)
        on_card = tensor.is_cuda and tensor.layout == torch.sparse_coo
        if torch.compiler.is_compiling() or not on_card or type(tensor) is not torch.Tensor:
            return result
        if tensor.is_coalesced() or tensor._nnz() < 2:
            return result
        with torch.no_grad():
            places, rows = tensor._indices(), tensor._values()
            values = policy.read(places)
            if values is None:
                policy.use("sized")
                places = places.clone()
            else:
                places = torch.unique(values, dim=1).to(places.device)
            rows = rows.new_zeros((places.shape[1], *rows.shape[1:]))
            return torch.sparse_coo_tensor(places, rows, tensor.shape, is_coalesced=True, check_invariants=False)

    return coalesce


def _draw_normal(policy: Policy) -> None:
    """Patch `torch.normal` at the dispatcher, where it checks every deviation: computed ones are valid."""
    torch = policy.torch

    def drawn(mean: Any, deviation: Any, generator: Any) -> Any:
        values = policy.read(deviation)
        if values is not None and bool((values < 0).any()):
            raise RuntimeError("normal expects all elements of std >= 0.0")
        policy.use("checks")
        shape = torch.broadcast_shapes(getattr(mean, "shape", ()), deviation.shape)
        made = torch.empty(shape, dtype=deviation.dtype, device=deviation.device)
        return made.normal_(0, 1, generator=generator).mul_(deviation).add_(mean)

    def of_both(mean: Any, std: Any, *, generator: Any = None) -> Any:
        return drawn(mean, std, generator)

    policy.implement("normal.Tensor_Tensor", of_both, "CUDA")
    policy.implement("normal.float_Tensor", of_both, "CUDA")
