"""Softmax as torch had it up to 1.10: its backward was given its input too, which lived until then.

`_softmax_backward_data(grad, result, dim, self)` in tools/autograd/derivatives.yaml of v1.10.0; later ones take the
dtype of the input in its place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class _Kept(torch.autograd.Function):
    """One of the two functions, with input and result saved."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, dim: int, logarithm: bool) -> Tensor:
        result = torch._log_softmax(given, dim, False) if logarithm else torch._softmax(given, dim, False)
        ctx.save_for_backward(given, result)
        ctx.dim, ctx.logarithm = dim, logarithm
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override, unused-ignore]
        given, result = ctx.saved_tensors
        back = torch._log_softmax_backward_data if ctx.logarithm else torch._softmax_backward_data
        return back(gradient, result, ctx.dim, given.dtype), None, None


def install() -> None:
    """From here on, in this process."""
    torch.Tensor.softmax = _keeping(False)  # type: ignore[method-assign, assignment]
    functional.softmax = _keeping(False)
    functional.log_softmax = _keeping(True)


def _keeping(logarithm: bool) -> Any:
    """The function; under autocast it is of the input in fp32."""

    def keeping(given: Tensor, dim: int, **named: Any) -> Tensor:
        wide = given.float() if torch.is_autocast_enabled("cuda") else given
        result: Tensor = _Kept.apply(wide, dim, logarithm)
        return result

    return keeping
