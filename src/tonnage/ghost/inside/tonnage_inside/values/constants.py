"""Numbers that kernels write and that are the same in every run: a loss's own gradient, a GradScaler's scale."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .policy import Policy


def patch(policy: Policy) -> None:
    """Patch torch for tensors on the card."""
    _patch_first_gradients(policy)
    _patch_scale(policy)


def _patch_first_gradients(policy: Policy) -> None:
    """Make the gradient of a loss by itself one, as kernels check that scale gradients (Liger's)."""
    torch, autograd = policy.torch, policy.torch.autograd
    original = autograd._make_grads

    @functools.wraps(original)
    def make_grads(outputs: Any, grads: Any, **options: Any) -> Any:
        made = original(outputs, grads, **options)
        first = (gradient for given, gradient in zip(grads, made, strict=False) if given is None)
        for gradient in first:
            scalar = (
                not torch.compiler.is_compiling()
                and policy.is_plain(gradient)
                and gradient.is_cuda
                and gradient.numel() == 1
            )
            if scalar:
                policy.write(gradient, torch.ones(gradient.shape, dtype=gradient.dtype))
        return made

    autograd._make_grads = make_grads


def _patch_scale(policy: Policy) -> None:
    """Keep a GradScaler's initial scale: it grows only after thousands of steps, and nothing overflows."""
    torch, kind = policy.torch, policy.torch.amp.GradScaler
    original = kind._lazy_init_scale_growth_tracker

    @functools.wraps(original)
    def begin(scaler: Any, device: Any) -> None:
        original(scaler, device)
        if policy.is_plain(scaler._scale) and scaler._scale.is_cuda:
            policy.write(scaler._scale, torch.full((), scaler._init_scale, device="cpu"))

    kind._lazy_init_scale_growth_tracker = begin
