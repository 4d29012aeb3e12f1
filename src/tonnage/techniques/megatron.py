"""Megatron's bf16: bf16 weights, with main weights, main gradients and optimizer states in fp32.

The gradients of all parameters are in one contiguous fp32 buffer.  Each bf16 gradient is added to its part of it as
soon as backward has computed it, and freed; the optimizer sees fp32 weights whose gradients are views of the buffer,
and the result is copied to the bf16 weights.  With AdamW that is 2 + 4 + 4 + 8 = 18 bytes a parameter.

`shard=ddp` sums the buffer over the ranks; `shard=zero1` is Megatron's distributed optimizer: the buffer is cut into
N equal pieces whatever parameters they cross, each rank keeps main weights and states of its own piece, and the bf16
weights, which are in one buffer too, are gathered after the step: 6 + 12/N bytes.  The rules are those of
`DistributedDataParallel`, `Float16OptimizerWithFloat16Params` and `DistributedOptimizer` in Megatron-LM's
megatron/core; its buckets divide the buffers for communication and take no memory of their own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from tonnage.case import Case
    from tonnage.step.step import NewOptimizer, Step

DATA: Final = ("dp_replicate", "cp")
"""Axes of the mesh along which gradients are averaged."""

SHARDS: Final = ("none", "ddp", "zero1")
"""Values of `shard` that the buffers of main gradients and weights are defined for."""


def accepts(case: Case) -> Refusal | None:
    """Refuse unless all weights are trained, by one optimizer, and each rank has all of them in bf16."""
    plan = case.plan
    if case.job.method != "full":
        return _refuse(
            f"main weights need weights that are trained, and the method is {case.job.method}", "bf16-true"
        )
    if plan.shard not in SHARDS:
        return _refuse(f"it needs all weights on every rank, and shard is {plan.shard}", "bf16-mixed")
    if plan.optimizer_in_backward or plan.optimizer_offload != "none":
        return _refuse("its optimizer steps once, on the GPU, from a buffer of all gradients", "bf16-mixed")
    if plan.optimizer == "muon":
        return _refuse("its buffer cuts matrices into pieces, which Muon cannot take", "bf16-mixed")
    return None


def _refuse(reason: str, instead: str) -> Refusal:
    return Refusal(technique="precision=megatron-bf16", reason=reason, instead=f"choose precision {instead}")


def apply(step: Step) -> Step:
    """Use bf16 weights under a MainOptimizer, which also does the work of `shard`."""
    import torch
    import torch.distributed as dist

    from tonnage.step import clipping
    from tonnage.step.main_weights import MainOptimizer

    world, adds_up = step.world, step.plan.shard != "none"
    group = world.group(*DATA) if adds_up else None
    pieces = dist.get_world_size(group) if step.plan.shard == "zero1" else 1
    piece = dist.get_rank(group) if pieces > 1 else 0

    def new_optimizer(parameters: list[nn.Parameter], new: NewOptimizer) -> Optimizer:
        return MainOptimizer(parameters, new, pieces=pieces, piece=piece, adds_up=adds_up, group=group)

    return replace(
        step,
        weights_dtype=torch.bfloat16,
        shard=None,
        gradients_stay_local=type(step).gradients_stay_local,
        new_optimizer=new_optimizer,
        clip=partial(clipping.clip, world=world, pieces=True) if pieces > 1 else step.clip,
    )


MEGATRON: Final = Technique(option="precision", values=("megatron-bf16",), accepts=accepts, apply=apply)
