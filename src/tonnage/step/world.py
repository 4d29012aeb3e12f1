"""Where a rank runs and how many others there are: its process group, and the device mesh of the job."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from tonnage.errors import CannotEstimate
from tonnage.mesh import Axes, axes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from tonnage.plans import Plan


@dataclass(frozen=True, kw_only=True)
class World:
    """Where a rank runs and how many others there are."""

    size: int = 1
    """Ranks of the job."""
    rank: int = 0
    """Which of them this process is."""
    gpus_per_node: int = 8
    """Ranks of one node: the shard group of HSDP."""
    device: torch.device
    """Where this rank computes."""
    made_group: bool = False
    """Whether the process group was made for this step, and is to be destroyed with it."""
    axes: Axes = field(default_factory=Axes)
    """How the ranks are laid out; all on one axis before `join`."""
    mesh: DeviceMesh | None = None
    """The same as a mesh of torch, with the axes that have several ranks; None for a rank that is alone."""
    expert_mesh: DeviceMesh | None = None
    """The same ranks laid out for experts: `efsdp` divides those that the ranks of `ep` share; None without ep."""

    def along(self, *names: str) -> DeviceMesh:
        """The part of the mesh along one axis, or along several as if they were one.

        Axes that the mesh does not have are left out.
        """
        assert self.mesh is not None
        have = [name for name in names if name in (self.mesh.mesh_dim_names or ())]
        if len(have) == 1:
            return self.mesh[have[0]]
        joined = "_".join(have)
        with _disable_current_modes():
            try:
                return self.mesh[joined]
            except (KeyError, RuntimeError):
                return self.mesh[tuple(have)]._flatten(joined)

    def group(self, *names: str) -> Any:
        """The process group of the ranks along these axes."""
        return self.along(*names).get_group()


def join(world: World, plan: Plan) -> World:
    """Take part in the process group of the job's ranks, making it where there is none, and lay out the mesh."""
    if not dist.is_initialized():
        _make_group(world, plan)
        world = replace(world, made_group=True)
    if dist.get_world_size() != world.size:
        raise CannotEstimate(
            f"The process group has {dist.get_world_size()} ranks, the job {world.size}; start as many processes."
        )
    found = axes(plan, world.size, world.gpus_per_node)
    with _disable_current_modes():  # ranks are laid out by real tensors, also where others are fake
        mesh = _mesh(world, found, plan)
        experts = _expert_mesh(world, found) if plan.ep > 1 else None
    return replace(world, rank=dist.get_rank(), axes=found, mesh=mesh, expert_mesh=experts)


def _mesh(world: World, laid: Axes, plan: Plan) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    names = laid.of_mesh(plan.shard)
    sizes = tuple(int(getattr(laid, name)) for name in names)
    return init_device_mesh(world.device.type, sizes, mesh_dim_names=names)


def _expert_mesh(world: World, laid: Axes) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    names = ("pp", "dp_replicate", "efsdp", "ep", "alone")  # the last for ranks that have a batch of their own
    sizes = (laid.pp, laid.dp_replicate, laid.sharing_experts // laid.ep, laid.ep, 1)
    return init_device_mesh(world.device.type, sizes, mesh_dim_names=names)


def _make_group(world: World, plan: Plan) -> None:
    """With parameters on the host, norms and scales of their gradients are exchanged there too."""
    on_card = "cpu:{},cuda:nccl" if plan.param_offload != "none" else "nccl"
    backend = on_card.format("gloo") if world.device.type == "cuda" else "gloo"
    if "RANK" in os.environ and os.environ.get("WORLD_SIZE") == str(world.size):
        dist.init_process_group(backend)
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore  # which makes the backend "fake" known

    if world.device.type == "cuda":
        # One rank without its peers: a ghost's NCCL asks nothing of them, and no store needs to answer.  More than
        # one root for the unique ids (torch's choice above 128 ranks) would wait for the other root's message.
        os.environ["TORCH_NCCL_RANKS_PER_ROOT"] = str(world.size)
        lone = on_card.format("fake")
        dist.init_process_group(lone, store=dist.HashStore(), rank=world.rank, world_size=world.size)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=world.rank, world_size=world.size)
