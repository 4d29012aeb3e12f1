"""`tonnage.apply`: a plan carried out on a user's network, by the code that estimated it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from tonnage.catalog.devices import parse_cluster
from tonnage.cluster import CPU, HERE, Cluster
from tonnage.errors import UnreadableModel, UsageError
from tonnage.job import Job
from tonnage.model import ModelRef
from tonnage.planner import plan_file
from tonnage.plans import Plan
from tonnage.step import configuration, heads, training
from tonnage.step import model as models
from tonnage.step.given import GivenNetwork
from tonnage.step.step import Step, assemble
from tonnage.techniques import environment, qlora, select_techniques
from tonnage.train import checks, choosing, networks
from tonnage.train.deepspeed import applying as by_deepspeed
from tonnage.train.restoring import Snapshot
from tonnage.train.trainable import Trainable

AUTO: Final = "auto"
"""The plan that is searched for."""

Hyperparameters = Mapping[str, Any] | Callable[[list[Any]], torch.optim.Optimizer]
"""Hyperparameters by name, or a function that makes the plan's optimizer over a list of parameters."""


def apply(
    plan: Plan | str | Path,
    network: nn.Module | str | Path,
    optimizer: Hyperparameters | None = None,
    *,
    job: Job | None = None,
) -> Trainable:
    """Return the network under the plan, ready to train; `tonnage.api.apply` explains the arguments.

    If anything cannot be done, the network stays as it was.
    """
    if plan == AUTO:
        plan = _choose_plan(network, job or Job())
    planned = plan_file.read(Path(plan)).model if isinstance(plan, str | Path) else None
    plan, job, cluster = read_plan(plan, job)
    if isinstance(network, str | Path):
        network = networks.load(network, job, plan)
    checks.check_network(network)
    job = replace(job, model=reference(network))
    if planned is not None:
        networks.check_model(planned, job.model.config)
    if qlora.formats(network):
        job = job.with_method("qlora")
    elif checks.adapted(network) is not None and job.method == "full":
        job = job.with_method("lora")
    checks.check_quantized(job, plan, network)
    checks.check_supported(job, plan)
    checks.check_adapters(job, plan, network)
    ranks = checks.count_ranks(plan, None if cluster is None else cluster.gpus)
    checks.warn_of_device(cluster, choose_kind(cluster))
    device = _choose_device(network, cluster, ranks)
    cluster = cluster or this_cluster(device, ranks)
    checks.check_techniques(job, plan, cluster)
    options = _optimizer_options(plan, optimizer)
    _check_environment(plan, device)
    if plan.engine == "deepspeed":
        by_deepspeed.check_here(plan, device, options.get("optimizer_factory"))
    snapshot, given = Snapshot(network), GivenNetwork(network)
    try:
        _prepare(network)
        if plan.engine == "deepspeed":
            own = options.get("hyperparameters", {})
            return by_deepspeed.apply(job, plan, cluster, device, given, snapshot, own, _suit_network)
        ready = assemble(
            job,
            plan,
            [*(technique.apply for technique in select_techniques(job, plan)), _suit_network],
            world_size=ranks,
            gpus_per_node=cluster.gpus_per_node,
            device=device,
            initialise=True,
            alone=False,
            given=given,
            **options,
        )
    except BaseException:
        snapshot.restore()
        given.give_back([(parameter, parameter.data) for parameter in network.parameters()])
        raise
    given.release()
    ready.model.train()
    return Trainable(ready, given, snapshot, cluster)


def _choose_plan(network: nn.Module | str | Path, job: Job) -> Plan:
    """Return the fastest plan for a network on this machine's GPUs.  Raises UsageError without one."""
    if isinstance(network, str | Path):
        raise UsageError("auto plans for a network that is there; load it, or give a plan beside the folder.")
    checks.check_network(network)
    if not torch.cuda.is_available():
        raise UsageError("auto plans for this machine's GPUs, and it has none; give a Plan.")
    job = job.with_method("lora") if checks.adapted(network) is not None and job.method == "full" else job
    return choosing.choose(network, job, this_cluster("cuda", int(os.environ.get("WORLD_SIZE", "1"))))


def read_plan(plan: Plan | str | Path, job: Job | None) -> tuple[Plan, Job, Cluster | None]:
    """Return the plan, the job and the GPUs of a Plan or of a plan file; the GPUs of a Plan are not known."""
    if isinstance(plan, Plan):
        return plan, job or Job(), None
    if not isinstance(plan, str | Path):
        raise UsageError(f"plan is a {type(plan).__name__}; give a Plan or the path of a plan file.")
    file = plan_file.read(Path(plan))
    names = {item.name for item in fields(Plan)}
    own = Plan(**{name: value for name, value in file.options.items() if name in names})
    stated = Job(**{name: value for name, value in file.options.items() if name not in names})
    return own, job or stated, parse_cluster(file.gpu, gpu_memory_bytes=file.gpu_memory_bytes)


def choose_kind(cluster: Cluster | None) -> str:
    """Return `cuda`, or `cpu` for a plan of the CPU and on a machine without GPUs."""
    return "cuda" if torch.cuda.is_available() and (cluster is None or cluster.device.id != CPU) else CPU


def _choose_device(network: nn.Module, cluster: Cluster | None, ranks: int) -> str:
    """Return this process's GPU, the one that the network is on if there is a choice; `cpu` without one."""
    if choose_kind(cluster) == CPU:
        return CPU
    held = next(network.parameters()).device
    return str(held) if held.type == "cuda" and ranks == 1 else "cuda"


def this_cluster(device: str, ranks: int) -> Cluster:
    """Return this machine's cards, or the CPU, as often as torchrun started processes on each machine."""
    per_machine = min(int(os.environ.get("LOCAL_WORLD_SIZE", ranks)), ranks)
    return parse_cluster(f"{ranks // per_machine}x{per_machine}x{CPU if device == CPU else HERE}")


def reference(network: nn.Module) -> ModelRef:
    """Return a reference by which techniques know what network it is; it is never built from it."""
    inner, name = models.hugging_face(network), type(network).__name__
    if inner is None:
        return ModelRef(name=name, kind="factory")
    return ModelRef(name=type(inner).__name__, kind="config", config=inner.config.to_dict())


def _optimizer_options(plan: Plan, optimizer: Hyperparameters | None) -> dict[str, Any]:
    """Return the fields of Step that the user's hyperparameters or factory fill."""
    if optimizer is None:
        return {}
    if isinstance(optimizer, Mapping):
        checks.check_hyperparameters(plan, optimizer)
        return {"hyperparameters": dict(optimizer)}
    if not callable(optimizer):
        raise UsageError(
            f"optimizer is a {type(optimizer).__name__}; give hyperparameters such as {{'lr': 2e-5}}, or a function "
            "that takes a list of parameters."
        )
    if plan.optimizer == "muon":
        raise UsageError("A function makes one optimizer, and muon needs two; give hyperparameters by name.")
    return {"optimizer_factory": optimizer}


def _check_environment(plan: Plan, device: str) -> None:
    """Raise UsageError if the process was started without the plan's allocator."""
    for name, value in environment(plan).items() if device != CPU else ():
        if os.environ.get(name) != value:
            raise UsageError(f"The plan needs {name}={value} from the start of the process; set it before.")


def _prepare(network: nn.Module) -> None:
    """Make a transformers network ready for training as an estimate does: no cache, and its task's hooks."""
    inner = models.hugging_face(network)
    if inner is None:
        return
    configuration.disable_caches(inner)
    with suppress(UnreadableModel):  # a class of the user's own, whose loss is its own affair
        training.prepare(inner, heads.of(inner).task)


def _suit_network(step: Step) -> Step:
    """Check the network's weights against the step that the techniques made, and choose its attention."""
    assert step.given is not None
    network = step.given.network
    checks.check_dtypes(step, network)
    if step.job.method == "full":
        checks.check_trained(network)
    inner = models.hugging_face(network)
    if step.attention is not None:
        if inner is None:
            raise UsageError(
                f"attention {step.plan.attention} is chosen through transformers, and {type(network).__name__} is no "
                "network of it; choose attention auto."
            )
        inner.set_attn_implementation(step.attention)
    return step
