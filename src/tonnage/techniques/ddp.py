"""DDP: every rank holds everything; gradients are averaged in buckets of 25 MiB, torch's default."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from tonnage.techniques.technique import Technique

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tonnage.step import Step


def apply(step: Step) -> Step:
    """Wrap the network; accumulate without communication."""
    device = step.world.device
    return replace(
        step,
        shard=lambda module: replicated(module, device),
        gradients_stay_local=lambda module: module.no_sync(),  # type: ignore[operator]
    )


def replicated(module: nn.Module, device: torch.device) -> Any:
    """The network in DistributedDataParallel with torch's defaults."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(module, device_ids=[device.index] if device.type == "cuda" else None)


DDP: Final = Technique(option="shard", values=("ddp",), apply=apply)
