"""Megatron-LM's training program as of the spring of 2021, where today's takes other memory for the same arguments.

Gradients were exchanged through a copy of all of them (`allreduce_gradients` of megatron/model/distributed.py), also
with one replica; their copies in fp32 lived from one step to the next (`zero_grad` of megatron/optimizer/optimizer.py
passed them by).  Apex's FusedAdam, which updates in place, is torch's of the same kind.  Otherwise as `megatron_lm`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from benchmarks.accuracy.scripts import megatron_lm

IMPORTS = megatron_lm.IMPORTS
prepare = megatron_lm.prepare


def measure(program: str, options: dict[str, Any]) -> dict[str, int]:
    """Bytes as `megatron_lm.measure`."""
    megatron_lm.checkout()
    _update_in_place()
    _keep_wide_gradients()
    _exchange_copies()
    return megatron_lm.measure(program, options)


def _update_in_place() -> None:
    torch.optim.AdamW = partial(torch.optim.AdamW, fused=True)  # type: ignore[misc, assignment]


def _keep_wide_gradients() -> None:
    from megatron.core.optimizer import optimizer

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        for group in (*self.float16_groups, *self.fp32_from_fp32_groups):
            optimizer._zero_grad_group_helper(group, set_to_none)

    optimizer.Float16OptimizerWithFloat16Params.zero_grad = zero_grad


def _exchange_copies() -> None:
    from megatron.training import training

    finalize = training.finalize_model_grads

    def finalize_model_grads(models: list[torch.nn.Module], *rest: Any, **named: Any) -> None:
        for model in models:
            for buffer in model.buffers:  # Megatron's own, of gradients
                buffer.grad_data.clone()
        finalize(models, *rest, **named)

    training.finalize_model_grads = finalize_model_grads
