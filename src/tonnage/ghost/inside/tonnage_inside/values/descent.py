"""Lets L-BFGS make all its iterations and remember each of them.

L-BFGS continues while gradients and steps are not zero, and remembers steps along which the gradient changed.  Since
they read as zero, it would end each step at its first check, without the history that is most of its memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .policy import Policy

_NEVER = float("-inf")
"""A tolerance that no size and no change is below."""
_CURVED = 1e-10
"""Lower bound with which L-BFGS compares the product of a step and its change of gradient."""


def patch(policy: Policy, module: ModuleType) -> None:
    """Patch `torch.optim.lbfgs` for parameters on the card."""
    torch, kind = policy.torch, module.LBFGS
    original = kind.step
    usual = {name: getattr(torch.Tensor, name) for name in ("__gt__", "__le__")}

    def held(name: str, tensor: Any, other: Any) -> Any:
        """Return a true comparison of a product with `_CURVED`, or of two slopes (a line search is over)."""
        result = usual[name](tensor, other)
        asked = isinstance(other, torch.Tensor) if name == "__le__" else isinstance(other, float) and other == _CURVED
        if (
            asked
            and policy.is_plain(tensor)
            and tensor.is_cuda
            and tensor.numel() == 1
            and policy.known(tensor) is None
        ):
            policy.write(result, torch.ones(result.shape, dtype=torch.bool))
        return result

    holding = {name: _method(held, name) for name in usual}

    @functools.wraps(original)
    def step(optimizer: Any, closure: Any) -> Any:
        (group,) = optimizer.param_groups
        if not any(parameter.is_cuda for parameter in group["params"]):
            return original(optimizer, closure)
        policy.use("descending")
        given = {name: group[name] for name in ("tolerance_grad", "tolerance_change")}
        group |= dict.fromkeys(given, _NEVER)
        for name in usual:
            setattr(torch.Tensor, name, holding[name])
        try:
            return original(optimizer, closure)
        finally:
            for name, before in usual.items():
                setattr(torch.Tensor, name, before)
            group |= given

    kind.step = step


def _method(held: Callable[..., Any], name: str) -> Callable[[Any, Any], Any]:
    return lambda tensor, other: held(name, tensor, other)
