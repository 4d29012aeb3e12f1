"""FSDP2: parameters, gradients and optimizer states sharded among the ranks, layer by layer.

`zero3` gathers a layer's parameters for its forward and again for its backward; `zero2` keeps them gathered in
between; `hsdp` is zero3 within a node and replicates across nodes.  A mixed precision becomes FSDP2's own policy
(sharded weights fp32, gathered ones in the compute dtype, gradients reduced in fp32), with no autocast.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tonnage.mesh import SHARDING, make_mesh
from tonnage.techniques.precision import dtype
from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from tonnage.case import Case
    from tonnage.cluster import Cluster
    from tonnage.step.step import Step


def _suggest_instead_of_hsdp(cluster: Cluster) -> str:
    """Return what to choose instead; the halves of one machine given as two have the same memory but other links."""
    half = cluster.gpus_per_node // 2
    if cluster.nodes > 1 or cluster.gpus_per_node % 2 or half == 1:
        return "choose shard zero3"
    return f"choose shard zero3, or say its halves as machines (2x{half}x{cluster.device.id}), for the memory alone"


def accepts(case: Case) -> Refusal | None:
    """Refuse HSDP without nodes to replicate across or GPUs within them to shard over."""
    plan, cluster = case.plan, case.cluster
    if plan.shard == "hsdp" and 1 in (cluster.nodes, cluster.gpus_per_node):
        return Refusal(
            technique="shard=hsdp",
            reason=f"it needs several nodes of several GPUs, and there are {cluster.nodes} x {cluster.gpus_per_node}",
            instead=_suggest_instead_of_hsdp(cluster),
        )
    if plan.shard == "hsdp":
        layout = make_mesh(plan, cluster.gpus, cluster.gpus_per_node)
        if 1 in (layout.dp_replicate, layout.dp_shard):
            return Refusal(
                technique="shard=hsdp",
                reason=f"beside tp {plan.tp}, cp {plan.cp} and pp {plan.pp} it would divide among {layout.dp_shard} "
                f"ranks and copy {layout.dp_replicate} times",
                instead="choose shard zero3",
            )
    return None


def apply(step: Step) -> Step:
    """Build without memory, wrap each layer and the whole, then allocate shards."""
    return replace(
        step,
        autocast_dtype=None,
        stream_dtype=step.autocast_dtype,
        shards_parameters=True,
        shard=lambda module: _shard(module, step),
        gradients_stay_local=_without_gradient_sync,
    )


def _shard(module: nn.Module, step: Step) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    from tonnage.step.model import layers

    options: dict[str, Any] = {
        "mesh": _mesh(step),
        "mp_policy": _precision(step),
        "reshard_after_forward": step.plan.shard != "zero2",
        "offload_policy": _offload(step),
    }
    for experts in (part for part in module.modules() if getattr(part, "gets_tokens", False)):
        _shard_experts(experts, step, options)
    for part in (*layers(module), module):
        if step.before_shard is not None:
            step.before_shard(part, step.world.device)
        fully_shard(part, **options)
    return module


def _shard_experts(module: Any, step: Step, options: dict[str, Any]) -> None:
    """Shard experts among the ranks that hold the same ones; their gradients are still averages over all batches."""
    from torch.distributed.fsdp import fully_shard

    axes, mesh = step.world.axes, step.world.expert_mesh
    assert mesh is not None
    part = mesh["dp_replicate", "efsdp"] if step.plan.shard == "hsdp" else mesh["efsdp"]
    placed = partial(_placement_of_experts, ranks=mesh["efsdp"].size())
    fully_shard(module, **{**options, "mesh": part, "shard_placement_fn": placed})
    module.set_gradient_divide_factor(float(axes.data_parallel * axes.cp))
    if axes.sharing_experts > axes.ep:
        # NCCL's scaled sums are zero in bf16 (pytorch#190747), gloo has none: sum, then divide
        module.set_force_sum_reduction_for_comms(True)


def _placement_of_experts(parameter: nn.Parameter, ranks: int) -> Any:
    """Return the placement that cuts rows if ranks are more than the experts they hold: else a rank would get all
    or nothing.
    """
    from torch.distributed.tensor import Shard

    shape = getattr(parameter, "_local_tensor", parameter).shape
    return Shard(1) if len(shape) > 1 and shape[0] % ranks != 0 and shape[1] % ranks == 0 else None


def _offload(step: Step) -> Any:
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    if step.parameters_device is None:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=step.world.device.type != "cpu")


def _mesh(step: Step) -> DeviceMesh:
    """Return the mesh; ranks of context parallelism shard parameters like those with batches of their own."""
    world = step.world
    if step.plan.shard != "hsdp":
        return world.along("dp_shard", "cp")
    assert world.mesh is not None
    return world.mesh["dp_replicate", *world.along("dp_shard", "cp").mesh_dim_names]


def _precision(step: Step) -> Any:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    given = step.plan.reduce_dtype
    reduce_dtype = dtype(given) if given else torch.float32 if step.autocast_dtype else None
    return MixedPrecisionPolicy(param_dtype=step.autocast_dtype, reduce_dtype=reduce_dtype)


@contextmanager
def _without_gradient_sync(module: Any) -> Iterator[None]:
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


FSDP: Final = Technique(option="shard", values=SHARDING, accepts=accepts, apply=apply)
