"""Gradient clipping across the ranks of a mesh: one norm over all shards, as torchtitan computes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from tonnage.step.world import World


def clip(parameters: list[nn.Parameter], largest_norm: float, *, world: World, pieces: bool = False) -> torch.Tensor:
    """Scale the gradients down to `largest_norm`, and return the norm over all ranks that hold a part of the network.

    A plain parameter is replicated over the ranks of `tp` unless it is marked as `divided`; pipeline stages hold
    different parameters, except those marked as a copy.  With `pieces` each data-parallel rank holds a piece of all.
    """
    groups = _group_by_mesh([parameter for parameter in parameters if parameter.grad is not None])
    whole, divided = torch.zeros((), device=world.device), torch.zeros((), device=world.device)
    for group in groups:
        squared = _squared_norm([parameter for parameter in group if not getattr(parameter, "is_copy", False)])
        if getattr(group[0], "divided", False):
            divided += squared
        else:
            whole += squared
    if pieces:
        dist.all_reduce(whole, group=world.group("dp_replicate", "cp"))
    if world.axes.tp > 1:
        if pieces:
            dist.all_reduce(divided, group=world.group("dp_replicate", "cp"))
        dist.all_reduce(divided, group=world.group("tp"))
    whole += divided
    if world.axes.pp > 1:
        dist.all_reduce(whole, group=world.group("pp"))
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, largest_norm, whole.sqrt())
    return whole.sqrt_()


def _group_by_mesh(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters grouped by mesh, so that each group's gradients can be combined."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        kind = (getattr(parameter, "device_mesh", None), getattr(parameter, "divided", False))
        groups.setdefault(kind, []).append(parameter)
    return list(groups.values())


def _squared_norm(parameters: list[nn.Parameter]) -> torch.Tensor:
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()
