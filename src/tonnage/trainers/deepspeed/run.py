"""DeepSpeed: `deepspeed.initialize` with the ZeRO stage that the plan's `shard` names, and its own loop.

Mixed precision is DeepSpeed's: weights and gradients in the compute dtype, no autocast, fp32 master weights and
moments in its optimizer.  docs/reference/engines.md has the bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final

from tonnage.catalog.optimizers import words
from tonnage.techniques.technique import Refusal
from tonnage.trainers.engine import (
    ANY,
    IMAGES,
    ROWS,
    SHAPES,
    Engine,
    refuse_by_techniques,
    refuse_undivided,
)
from tonnage.trainers.liger import refuse_missing_liger

if TYPE_CHECKING:
    from tonnage.case import Case
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.step.step import Step
    from tonnage.step.world import World

STAGES: Final = {"none": 0, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}
"""The ZeRO stage of each `shard`."""

OPTIMIZERS: Final[Mapping[str, Mapping[str, Any]]] = words("deepspeed")
"""Parameters of DeepSpeed's optimizer AdamW; `adamw` is FusedAdam on the card, DeepSpeedCPUAdam on the host."""

BUFFER_ELEMENTS: Final = 100_000_000
"""DeepSpeed's default size of the buffer for parameters in files; a rank's part with more elements needs more."""

PLACES: Final = ("offload_optimizer", "offload_param")
"""The sections of DeepSpeed's configuration that say where optimizer states and parameters rest."""

OWN: Final = ("optimizer", "loss", "optimizer_offload", "param_offload")
"""Options for which it has its own code."""


def accepts(case: Case) -> Refusal | None:
    """Return what DeepSpeed's stages cannot do together, or the first refusal of the shared techniques."""
    plan = case.plan
    return (
        refuse_undivided(plan, case.cluster, "choose shard ddp, zero1, zero2 or zero3")
        or _refuse_offload(plan)
        or _refuse_whole_files(case)
        or _refuse_resume(case.job, plan)
        or refuse_missing_liger(plan)
        or refuse_by_techniques(case, OWN)
    )


def _refuse_offload(plan: Plan) -> Refusal | None:
    """Return the refusal of an offload that the stage or the optimizer does not have."""
    if plan.param_offload != "none" and plan.shard != "zero3":
        return Refusal(
            technique=f"param-offload={plan.param_offload}",
            reason=f"DeepSpeed moves parameters in stage 3 only, and shard is {plan.shard}",
            instead="choose shard zero3, or optimizer-offload",
        )
    if keeps_states_elsewhere(plan) and STAGES[plan.shard] == 0:
        return Refusal(
            technique=f"optimizer-offload={plan.optimizer_offload}",
            reason="it is a part of ZeRO, and there is none without shard zero1, zero2 or zero3",
            instead="choose shard zero2",
        )
    if plan.optimizer != "adamw" and keeps_states_elsewhere(plan):
        return Refusal(
            technique=f"optimizer={plan.optimizer}",
            reason="states on the host want DeepSpeed's own AdamW",
            instead="choose optimizer adamw",
        )
    return None


def _refuse_whole_files(case: Case) -> Refusal | None:
    """Return the refusal of whole files where the stage divides."""
    if case.job.save_checkpoint != "full" or STAGES[case.plan.shard] == 0 or case.cluster.gpus == 1:
        return None
    return Refusal(
        technique=f"save-checkpoint={case.job.save_checkpoint}",
        reason=f"of what shard {case.plan.shard} divides DeepSpeed saves each rank's part",
        instead="choose save-checkpoint sharded",
    )


def _refuse_resume(job: Job, plan: Plan) -> Refusal | None:
    """Return the refusal of what `load_checkpoint` does not do.

    It reads all files to the host, and copies those of tensors in files as they are.
    """
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


def keeps_states_elsewhere(plan: Plan) -> bool:
    """Return whether the optimizer is on the host: with its parameters it goes there as well."""
    return (plan.param_offload, plan.optimizer_offload) != ("none", "none")


def run(job: Job, plan: Plan, world: World, steps: int) -> object:
    """Train as in DeepSpeed's documentation: initialize, then forward, backward and step for every micro-batch."""
    from tonnage.trainers import resume

    def run(job: Job, world: World, steps: int, folder: str) -> object:
        import deepspeed

        from tonnage.trainers import common

        os.environ.update(common.launcher_variables(world))
        deepspeed.init_distributed(dist_backend="nccl")
        step = common.network_step(job, plan, world)
        return _train(step, _configure(step, plan, world, folder), steps, os.path.join(folder, "checkpoint"))

    return resume.run_with_files(job, world, steps, run, kind="sharded")


def _train(step: Step, config: dict[str, Any], steps: int, checkpoint: str) -> object:
    import torch

    from tonnage.step.events import phase
    from tonnage.techniques.precision import dtype
    from tonnage.trainers import common
    from tonnage.trainers.deepspeed.step import make

    job, plan = step.job, step.plan
    with _dividing(plan, config):
        network = common.build_network(step, torch.device("cuda") if plan.shard == "zero3" else None)
    ready = make(step, network, config)
    engine: Any = ready.model
    if job.resume != "none":
        with phase("resume"):
            engine.load_checkpoint(checkpoint)
    images_dtype = dtype(plan.compute_dtype)  # there is no autocast to cast images and sounds
    rows = common.Rows(step, engine.module, common.count_rows(step, steps), images_dtype)
    loader = torch.utils.data.DataLoader(rows, batch_size=job.micro_batch, pin_memory=True, collate_fn=common.collate)
    for number, batch in zip(range(1, steps * job.grad_accum + 1), loader, strict=False):
        is_last = number % job.grad_accum == 0
        with nullcontext() if is_last else ready.step.gradients_stay_local(engine):
            ready.micro_batch(ready.to_device(batch), job.grad_accum)
        if is_last:
            ready.update()
    if job.generate is not None:
        with common.contexts(step):
            common.generate(step, engine.module, rows)
    if job.save_checkpoint != "none":
        with phase("save"):
            engine.save_checkpoint(checkpoint)
    return ready


def _dividing(plan: Plan, config: dict[str, Any]) -> AbstractContextManager[Any]:
    """Return `deepspeed.zero.Init` for stage 3, in which modules are divided as they are made."""
    if plan.shard != "zero3":
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.Init(config_dict_or_path=config)
    return context


def _configure(step: Step, plan: Plan, world: World, folder: str) -> dict[str, Any]:
    """Return DeepSpeed's configuration of a network that is not made yet."""
    import torch

    from tonnage.step import model
    from tonnage.trainers.deepspeed.step import configure

    network = None
    if plan.param_offload == "nvme":
        meta = torch.device("meta")
        network = model.build(step.job.model, dtype=step.weights_dtype, attention=step.attention, device=meta)
    return configure(step.job, plan, folder, network, world.size)


def settings(
    job: Job,
    plan: Plan,
    swap_settings: Mapping[str, dict[str, Any]] | None = None,
    optimizer: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return DeepSpeed's configuration; sizes of buckets and whatever else is not named stay its defaults.

    `swap_settings` are those of tensors in files, by the section of PLACES; `optimizer` has the user's
    hyperparameters.
    """
    return {
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_accumulation_steps": job.grad_accum,
        "bf16": {"enabled": plan.precision == "bf16-mixed"},
        "fp16": {"enabled": plan.precision == "fp16-mixed"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, **OPTIMIZERS[plan.optimizer], **(optimizer or {})}},
        "gradient_clipping": float(plan.clip_grad_norm or 0),
        "zero_optimization": {"stage": STAGES[plan.shard], **_places(plan, swap_settings or {})},
    }


def _places(plan: Plan, swap_settings: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return where states and parameters rest; the optimizer's states go where the parameters are."""
    states = plan.param_offload if plan.optimizer_offload == "none" else plan.optimizer_offload
    devices = dict(zip(PLACES, (states, plan.param_offload), strict=True))
    return {
        name: {"device": device, "pin_memory": True, **(swap_settings.get(name, {}) if device == "nvme" else {})}
        for name, device in devices.items()
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

DEEPSPEED_ENGINE: Final = Engine(
    name="deepspeed",
    packages=("deepspeed",),
    expresses={
        **EXPRESSES,
        **IMAGES,
        **ROWS,
        "loss": ("plain", "liger"),
        "outputs": ANY,
        "generate": ANY,
        "save_checkpoint": ANY,
        "resume": ANY,
    },
    accepts=accepts,
    imports=("deepspeed",),
    run=run,
)
