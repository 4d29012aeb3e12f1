"""`tonnage.apply` of a plan for the engine deepspeed: the step that was estimated, on a user's network.

DeepSpeed's configuration and its step are those of the estimate (`trainers/deepspeed`).  Under stage 3 the given
weights are divided one by one where an estimate divides them as they are made.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from tonnage.cluster import CPU
from tonnage.errors import OutOfDeviceMemory, TrialFailed, UsageError
from tonnage.step import model as models
from tonnage.step.step import Step, select_device
from tonnage.step.world import World, join
from tonnage.techniques import disk
from tonnage.techniques.precision import dtype
from tonnage.train.deepspeed.trainable import EngineTrainable
from tonnage.train.restoring import with_variable
from tonnage.trainers import common
from tonnage.trainers.deepspeed import step as engine_step
from tonnage.trainers.deepspeed.run import keeps_states_elsewhere

if TYPE_CHECKING:
    from tonnage.cluster import Cluster
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.step.given import GivenNetwork
    from tonnage.train.restoring import Snapshot

_ON_CPU: Final = {"torch_adam": True}
"""Hyperparameters on the CPU: torch's AdamW, where DeepSpeed would compile its own for a minute."""

_SHARED_MEMORY: Final = "deepspeed_shm_comm"
"""Operation that DeepSpeed compiles with any process group on the CPU, and uses in inference alone."""


def check_here(plan: Plan, device: str, optimizer: object) -> None:
    """Raise UsageError if DeepSpeed cannot carry the plan out on this device.

    It compiles its operations at first use, which takes minutes.
    """
    if callable(optimizer):
        raise UsageError("DeepSpeed makes the optimizer of its configuration; give hyperparameters by name.")
    kind = torch.device(device).type
    with with_variable("DS_ACCELERATOR", CPU) if kind == CPU else nullcontext():  # else it looks for cards
        import deepspeed
        from deepspeed.accelerator import get_accelerator
        from deepspeed.utils import logger

        accelerator = get_accelerator()
    logger.handlers[:] = [logging.lastResort]  # which writes to stderr: stdout is for results
    # torch deprecates what DeepSpeed calls for every exchange
    warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning, r"torch\.distributed\.c10d_logger")
    if accelerator.device_name() != kind:
        raise UsageError(
            f"The plan is for {kind}, and DeepSpeed computes on {accelerator.device_name()} in this process; set "
            f"DS_ACCELERATOR={kind} before it starts."
        )
    if plan.precision == "fp16-mixed" and not accelerator.is_fp16_supported():
        raise UsageError(f"DeepSpeed does not compute in fp16 on {kind} here; choose bf16-mixed or fp32.")
    if kind == CPU:
        deepspeed.ops.__compatible_ops__[_SHARED_MEMORY] = False
    for builder, option, needs in _operations(plan, kind):
        try:
            accelerator.create_op_builder(builder).load()
        except Exception as error:
            reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            raise UsageError(
                f"{option} needs an operation that DeepSpeed compiles, which takes {needs}: {reason[:300]}."
            ) from None


def _operations(plan: Plan, kind: str) -> Iterator[tuple[str, str, str]]:
    """Yield the builders of the operations that DeepSpeed uses for a plan, with the option and what it takes."""
    for name in ("optimizer_offload", "param_offload"):
        if getattr(plan, name) == "nvme":
            yield "AsyncIOBuilder", f"{name.replace('_', '-')} nvme", "libaio with its headers, ninja and a compiler"
    if kind != CPU and plan.optimizer == "adamw":
        on_host = keeps_states_elsewhere(plan)
        builder, compiler = ("CPUAdamBuilder", "a compiler") if on_host else ("FusedAdamBuilder", "CUDA's compiler")
        yield builder, f"optimizer {plan.optimizer}", f"ninja and {compiler}"


def apply(
    job: Job,
    plan: Plan,
    cluster: Cluster,
    device: str,
    given: GivenNetwork,
    snapshot: Snapshot,
    hyperparameters: Mapping[str, Any],
    suit: Callable[[Step], Step],
) -> EngineTrainable:
    """Return the network in DeepSpeed's engine; `suit` checks its weights against the step."""
    import deepspeed

    world = World(size=cluster.gpus, gpus_per_node=cluster.gpus_per_node, device=select_device(device))
    world = replace(join(world, plan, alone=False), made_group=False)  # DeepSpeed keeps its groups of ranks
    with ExitStack() as resources:
        card = str(world.device.index or 0)
        resources.enter_context(with_variable("LOCAL_RANK", card))  # by which its engine chooses a card
        deepspeed.init_distributed(dist_backend="gloo" if world.device.type == CPU else "nccl")
        step = suit(replace(common.network_step(job, plan, world), world=world, given=given, initialise=True))
        network = given.network
        swapped = tempfile.TemporaryDirectory(prefix="tonnage-swapped-", dir=disk.folder())
        options = {**hyperparameters, **(_ON_CPU if world.device.type == CPU else {})}
        config = engine_step.configure(job, plan, resources.enter_context(swapped), network, world.size, **options)
        before = {parameter: set(vars(parameter)) for parameter in network.parameters()}
        with _says_if_changed(network):
            if plan.shard == "zero3":
                _divide(network, dtype(plan.compute_dtype), config, world.device)
            ready = engine_step.make(step, network, config)
        ready.model.train()
        return EngineTrainable(ready, given, snapshot, cluster, resources=resources.pop_all(), before=before)


@contextmanager
def _says_if_changed(network: nn.Module) -> Iterator[None]:
    """Raise an error that says so if the block failed with weights divided or of another dtype, which stay so."""
    dtypes = [parameter.dtype for parameter in network.parameters()]
    try:
        yield
    except Exception as error:
        now = [parameter.dtype for parameter in network.parameters()]
        if now == dtypes and not any(hasattr(parameter, "ds_id") for parameter in network.parameters()):
            raise
        kind = OutOfDeviceMemory if isinstance(error, torch.OutOfMemoryError) else TrialFailed
        reason = str(error).partition("\n")[0].partition(" GPU ")[0].rstrip(". ") or type(error).__name__
        raise kind(
            f"DeepSpeed failed after it had divided or converted the network's weights ({reason}); load the network "
            "again before another plan."
        ) from error


def _divide(network: nn.Module, compute: torch.dtype, config: dict[str, Any], device: torch.device) -> None:
    """Divide a given network among the ranks in the compute dtype, a parameter at a time."""
    import deepspeed

    for parameter in network.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(compute)
    deepspeed.zero.Init(module=network, config_dict_or_path=config)
    models.buffers_to(network, device)
