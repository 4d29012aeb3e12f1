"""A rank's place among the others: its process group, and the device mesh of the job."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from tonnage.errors import CannotEstimate, UsageError
from tonnage.mesh import Mesh, make_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from tonnage.plans import Plan


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks of a job, and which of them this process is."""

    size: int = 1
    """Number of ranks of the job."""
    rank: int = 0
    """Rank of this process."""
    gpus_per_node: int = 8
    """Ranks per node: the shard group of HSDP."""
    device: torch.device
    """The device on which this rank computes."""
    made_group: bool = False
    """True if the process group was made for this step, and is to be destroyed with it."""
    axes: Mesh = field(default_factory=Mesh)
    """The layout of the ranks; all on one axis before `join`."""
    mesh: DeviceMesh | None = None
    """The same as a DeviceMesh, with the axes that have several ranks; None for a single rank."""
    expert_mesh: DeviceMesh | None = None
    """The same ranks layout out for experts: `efsdp` is the axis that shards what the ranks of `ep` hold; None
    without ep.
    """

    def along(self, *names: str) -> DeviceMesh:
        """Return the part of the mesh along one axis, or along several axes flattened into one.

        Axes that the mesh does not have are left out.
        """
        assert self.mesh is not None
        present = [name for name in names if name in (self.mesh.mesh_dim_names or ())]
        if len(present) == 1:
            return self.mesh[present[0]]
        joined = "_".join(present)
        with _disable_current_modes():
            try:
                return self.mesh[joined]
            except (KeyError, RuntimeError):
                return self.mesh[tuple(present)]._flatten(joined)

    def group(self, *names: str) -> Any:
        """Return the process group of the ranks along these axes."""
        return self.along(*names).get_group()


def join(world: World, plan: Plan, *, alone: bool = True) -> World:
    """Join the process group of the job's ranks, making it if there is none, and lay out the mesh.

    With `alone` a process without torchrun acts as one rank whose peers do not exist, which only gives an estimate;
    else it raises UsageError.
    """
    if not dist.is_initialized():
        _make_group(world, plan, alone=alone)
        world = replace(world, made_group=True)
    if dist.get_world_size() != world.size:
        raise CannotEstimate(
            f"The process group has {dist.get_world_size()} ranks, the job {world.size}; start as many processes."
        )
    layout = make_mesh(plan, world.size, world.gpus_per_node)
    with _disable_current_modes():  # DeviceMesh needs real tensors, also inside a fake tensor mode
        mesh = _mesh(world, layout, plan)
        experts = _expert_mesh(world, layout) if plan.ep > 1 else None
    return replace(world, rank=dist.get_rank(), axes=layout, mesh=mesh, expert_mesh=experts)


def _mesh(world: World, layout: Mesh, plan: Plan) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    names = layout.of_mesh(plan.shard)
    sizes = tuple(int(getattr(layout, name)) for name in names)
    return init_device_mesh(world.device.type, sizes, mesh_dim_names=names)


def _expert_mesh(world: World, layout: Mesh) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    names = (
        "pp",
        "dp_replicate",
        "efsdp",
        "ep",
        "alone",
    )  # the last axis is for ranks that have a batch of their own
    sizes = (layout.pp, layout.dp_replicate, layout.sharing_experts // layout.ep, layout.ep, 1)
    return init_device_mesh(world.device.type, sizes, mesh_dim_names=names)


def _make_group(world: World, plan: Plan, *, alone: bool) -> None:
    """Make the process group; with parameters on the host, norms and scales of their gradients are reduced there
    too.
    """
    on_card = "cpu:{},cuda:nccl" if plan.param_offload != "none" else "nccl"
    backend = on_card.format("gloo") if world.device.type == "cuda" else "gloo"
    if "RANK" in os.environ and os.environ.get("WORLD_SIZE") == str(world.size):
        dist.init_process_group(backend)
        return
    if not alone:
        if world.size > 1:
            raise UsageError(
                f"The plan needs {world.size} processes, and this one was started without torchrun; start it with "
                f"torchrun --nproc-per-node {min(world.size, world.gpus_per_node)}."
            )
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    if world.device.type == "cuda":
        # This rank runs without its peers: a ghost's NCCL asks nothing of them, and no store needs to answer.  More
        # than one root for the unique ids (torch's choice above 128 ranks) would wait for the other root's message.
        os.environ["TORCH_NCCL_RANKS_PER_ROOT"] = str(world.size)
        backend = on_card.format("fake")
        dist.init_process_group(backend, store=dist.HashStore(), rank=world.rank, world_size=world.size)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=world.rank, world_size=world.size)
