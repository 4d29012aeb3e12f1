"""ZeRO-1: DDP with optimizer states sharded among the ranks (torch's ZeroRedundancyOptimizer)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from tonnage.techniques import ddp
from tonnage.techniques.technique import Technique

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from tonnage.step.step import NewOptimizer, Step
    from tonnage.step.world import World


def apply(step: Step) -> Step:
    """Use DDP, and make every optimizer by ZeroRedundancyOptimizer."""
    return replace(ddp.apply(step), new_optimizer=partial(_shard_optimizer, world=step.world))


def _shard_optimizer(parameters: list[nn.Parameter], new: NewOptimizer, world: World) -> Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    group = world.group("dp_replicate", "cp")
    sharded: Optimizer = ZeroRedundancyOptimizer(parameters, optimizer_class=new, process_group=group)
    sharded.defaults = sharded.optim.defaults  # where OneCycleLR looks for betas
    return sharded


ZERO1: Final = Technique(option="shard", values=("zero1",), apply=apply, libraries=("torch.distributed.optim",))
