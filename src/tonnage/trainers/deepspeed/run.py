"""DeepSpeed: `deepspeed.initialize` with the ZeRO stage that the plan's `shard` names, and its own loop.

A mixed precision is DeepSpeed's: weights and gradients in the compute dtype, no autocast, fp32 master weights and
moments in its optimizer.  docs/reference/engines.md has the bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final

from tonnage.techniques.technique import Refusal
from tonnage.trainers.engine import ANY, IMAGES, ROWS, SHAPES, Engine
from tonnage.trainers.hf_trainer.run import shared_refusal

if TYPE_CHECKING:
    from torch import nn

    from tonnage.case import Case
    from tonnage.cluster import Cluster
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.step.step import Step
    from tonnage.step.world import World

STAGES: Final = {"none": 0, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}
"""The ZeRO stage of each `shard`."""

OPTIMIZERS: Final[dict[str, dict[str, Any]]] = {
    "adamw": {},
    "adamw-loop": {"torch_adam": True, "foreach": False},
    "adamw-foreach": {"torch_adam": True, "foreach": True},
}
"""Parameters of DeepSpeed's optimizer AdamW; `adamw` is FusedAdam on the card, DeepSpeedCPUAdam on the host."""

BUFFER_ELEMENTS: Final = 100_000_000
"""DeepSpeed's own size of a buffer through which parameters in files are read; a larger part wants a larger one."""

PLACES: Final = ("offload_optimizer", "offload_param")
"""What DeepSpeed's configuration calls where optimizer states and parameters rest."""

OWN: Final = ("optimizer", "loss", "optimizer_offload", "param_offload")
"""Options for which it has its own code."""


def accepts(case: Case) -> Refusal | None:
    """What DeepSpeed's stages cannot do together, and what the shared techniques say."""
    plan = case.plan
    return (
        _replicated(plan, case.cluster)
        or _offload(plan)
        or _saved(case)
        or _resumed(case.job, plan)
        or shared_refusal(case, OWN)
    )


def _replicated(plan: Plan, cluster: Cluster) -> Refusal | None:
    if plan.shard == "none" and cluster.gpus > 1:
        return Refusal(
            technique="engine=deepspeed",
            reason=f"on {cluster.gpus} GPUs it always divides or replicates",
            instead="choose shard ddp, zero1, zero2 or zero3",
        )
    return None


def _offload(plan: Plan) -> Refusal | None:
    if plan.param_offload != "none" and plan.shard != "zero3":
        return Refusal(
            technique=f"param-offload={plan.param_offload}",
            reason=f"DeepSpeed moves parameters in stage 3 only, and shard is {plan.shard}",
            instead="choose shard zero3, or optimizer-offload",
        )
    if _optimizer_offload(plan) and STAGES[plan.shard] == 0:
        return Refusal(
            technique=f"optimizer-offload={plan.optimizer_offload}",
            reason="it is a part of ZeRO, and there is none without shard zero1, zero2 or zero3",
            instead="choose shard zero2",
        )
    if plan.optimizer != "adamw" and _optimizer_offload(plan):
        return Refusal(
            technique=f"optimizer={plan.optimizer}",
            reason="states on the host want DeepSpeed's own AdamW",
            instead="choose optimizer adamw",
        )
    return None


def _saved(case: Case) -> Refusal | None:
    if case.job.save_checkpoint != "full" or STAGES[case.plan.shard] == 0 or case.cluster.gpus == 1:
        return None
    return Refusal(
        technique=f"save-checkpoint={case.job.save_checkpoint}",
        reason=f"of what shard {case.plan.shard} divides DeepSpeed saves each rank's part",
        instead="choose save-checkpoint sharded",
    )


def _resumed(job: Job, plan: Plan) -> Refusal | None:
    """`load_checkpoint` reads all files to the host, and copies those of tensors in files as they are."""
    if job.resume == "none":
        return None
    if job.resume == "gpu":
        reason, instead = "DeepSpeed has states brought to the CPU", "choose resume cpu"
    elif "nvme" in (plan.optimizer_offload, plan.param_offload):
        option = "optimizer-offload" if plan.param_offload != "nvme" else "param-offload"
        reason, instead = "DeepSpeed copies files of tensors, which were not written", f"choose {option} cpu"
    else:
        return None
    return Refusal(technique=f"resume={job.resume}", reason=reason, instead=instead)


def _optimizer_offload(plan: Plan) -> bool:
    """With its parameters, the optimizer goes to the host as well."""
    return (plan.param_offload, plan.optimizer_offload) != ("none", "none")


def run(job: Job, plan: Plan, world: World, steps: int) -> object:
    """As in DeepSpeed's documentation: initialize, then forward, backward and step for every micro-batch."""
    from tonnage.trainers import resume as earlier_runs

    def run(job: Job, world: World, steps: int, folder: str) -> object:
        import deepspeed

        from tonnage.trainers import common as given

        os.environ.update(given.launcher_variables(world))
        deepspeed.init_distributed(dist_backend="nccl")
        step = given.described(job, plan, world)
        config = settings(job, plan, _swapping(step, plan, world, folder))
        return _trained(step, plan, config, steps, os.path.join(folder, "checkpoint"))

    return earlier_runs.trained(job, world, steps, run, kept="sharded")


def _trained(step: Step, plan: Plan, config: dict[str, Any], steps: int, checkpoint: str) -> object:
    import deepspeed
    import torch

    from tonnage.step.events import phase
    from tonnage.techniques.precision import dtype
    from tonnage.trainers import common as given

    job = step.job
    module = _network(step, plan, config)
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=[p for p in module.parameters() if p.requires_grad], config=config
    )
    if job.resume != "none":
        with phase("resume"):
            engine.load_checkpoint(checkpoint)
    takes = dtype(plan.compute_dtype)  # there is no autocast to cast what the network sees and hears
    rows = given.Rows(step, module, given.rows_needed(step, steps), takes)
    loader = torch.utils.data.DataLoader(rows, batch_size=job.micro_batch, pin_memory=True, collate_fn=given.collated)
    returned = given.Returned(plan.outputs)
    with given.contexts(step):
        for _, batch in zip(range(steps * job.grad_accum), loader, strict=False):
            loss = returned.loss_of(engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()}))
            engine.backward(loss)
            engine.step()
            returned.stepped()
        if job.generate is not None:
            given.generate(step, engine.module, rows)
    if job.save_checkpoint != "none":
        with phase("save"):
            engine.save_checkpoint(checkpoint)
    return engine


def _network(step: Step, plan: Plan, config: dict[str, Any]) -> nn.Module:
    """On the host; for stage 3 made on the card, layer by layer under `deepspeed.zero.Init`, which divides it."""
    import torch

    from tonnage.techniques.checkpointing import CHECKPOINTING
    from tonnage.trainers import common as given

    with _divided(plan, config):
        module = given.network(step, torch.device("cuda") if plan.shard == "zero3" else None)
    module = given.adapted(module, step)
    if CHECKPOINTING.chosen(step.job, plan):
        for change in CHECKPOINTING.apply(step).changes:
            module = change(module)
    return module


def _divided(plan: Plan, config: dict[str, Any]) -> AbstractContextManager[Any]:
    if plan.shard != "zero3":
        return nullcontext()
    import deepspeed

    made: AbstractContextManager[Any] = deepspeed.zero.Init(config_dict_or_path=config)
    return made


def _swapping(step: Step, plan: Plan, world: World, folder: str) -> dict[str, dict[str, Any]]:
    """What DeepSpeed has to know of its files: where they are, and how much a buffer must hold of a parameter."""
    if plan.param_offload != "nvme":
        return {"offload_optimizer": {"nvme_path": folder}}
    import torch

    from tonnage.step import model as models

    network = models.build(
        step.job.model, dtype=step.weights_dtype, attention=step.attention, device=torch.device("meta")
    )
    largest = max(models.elements(parameter) for parameter in network.parameters())
    size = max(BUFFER_ELEMENTS, -(-largest // world.size))
    where = {"nvme_path": folder}
    return {"offload_optimizer": where, "offload_param": {**where, "buffer_size": size}}


def settings(job: Job, plan: Plan, swapping: Mapping[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    """DeepSpeed's configuration; sizes of buckets and whatever else is not named stay its defaults.

    `swapping`: what it has to know, by place, of tensors in files.
    """
    return {
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_accumulation_steps": job.grad_accum,
        "bf16": {"enabled": plan.precision == "bf16-mixed"},
        "fp16": {"enabled": plan.precision == "fp16-mixed"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, **OPTIMIZERS[plan.optimizer]}},
        "gradient_clipping": float(plan.clip_grad_norm or 0),
        "zero_optimization": {"stage": STAGES[plan.shard], **_places(plan, swapping or {})},
    }


def _places(plan: Plan, swapping: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Where states and parameters rest; with its parameters, the optimizer's states go there."""
    states = plan.param_offload if plan.optimizer_offload == "none" else plan.optimizer_offload
    places = dict(zip(PLACES, (states, plan.param_offload), strict=True))
    return {
        name: {"device": device, "pin_memory": True, **(swapping.get(name, {}) if device == "nvme" else {})}
        for name, device in places.items()
        if device != "none"
    }


EXPRESSES: Final[Mapping[str, tuple[str, ...]]] = {
    **SHAPES,
    "method": ("full", "lora"),
    "lora_rank": ANY,
    "lora_dropout": ANY,
    "lora_targets": ANY,
    "precision": ("bf16-mixed", "fp16-mixed", "fp32"),
    "optimizer": tuple(OPTIMIZERS),
    "optimizer_offload": ("none", "cpu", "nvme"),
    "clip_grad_norm": ANY,
    "checkpointing": ("none", "full", "every-N", "selective"),
    "shard": tuple(STAGES),
    "param_offload": ("none", "cpu", "nvme"),
    "attention": ANY,
}

DEEPSPEED: Final = Engine(
    name="deepspeed",
    packages=("deepspeed",),
    expresses={**EXPRESSES, **IMAGES, **ROWS, "outputs": ANY, "generate": ANY, "save_checkpoint": ANY, "resume": ANY},
    accepts=accepts,
    imports=("deepspeed",),
    run=run,
)
