"""DDP: every rank holds everything; gradients are averaged in buckets of 25 MiB, torch's default."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from tonnage.techniques.technique import Technique

if TYPE_CHECKING:
    from torch import nn

    from tonnage.step.step import Step
    from tonnage.step.world import World


def apply(step: Step) -> Step:
    """Wrap the network; accumulate without communication."""
    return replace(
        step,
        shard=lambda module: replicated(module, step.world),
        gradients_stay_local=lambda module: module.no_sync(),  # type: ignore[operator]
    )


def replicated(module: nn.Module, world: World) -> Any:
    """Return the network in DistributedDataParallel with torch's defaults; ranks that share a sequence hold
    copies too.
    """
    from torch.nn.parallel import DistributedDataParallel

    devices = [world.device.index] if world.device.type == "cuda" else None
    return DistributedDataParallel(module, device_ids=devices, process_group=world.group("dp_replicate", "cp"))


DDP: Final = Technique(option="shard", values=("ddp",), apply=apply)
