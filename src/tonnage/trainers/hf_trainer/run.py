"""Hugging Face's Trainer: TrainingArguments with its own defaults, `Trainer.train()`.

What the plan has no option for stays as the Trainer has it: the loss on fp32 logits, gradients clipped at norm 1.0,
outputs cast to fp32 by accelerate, fused AdamW.  docs/reference/engines.md has what that does to memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tonnage.catalog.optimizers import find_optimizer, words
from tonnage.mesh import SHARDING
from tonnage.techniques.technique import Refusal, first_of
from tonnage.trainers.accelerate.plugin import (
    checkpoint_kind,
    checkpoint_settings,
    parallelism_settings,
    refuse_context_parallel,
    refuse_resume,
    refuse_sharded_files,
)
from tonnage.trainers.engine import (
    ANY,
    FILES,
    IMAGES,
    ROWS,
    SHAPES,
    Engine,
    refuse_by_techniques,
    refuse_undivided,
)
from tonnage.trainers.liger import check_liger, refuse_missing_liger
from tonnage.trainers.packages import find_version

if TYPE_CHECKING:
    from torch import nn

    from tonnage.case import Case
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.step.world import World

OPTIMIZERS: Final[Mapping[str, Mapping[str, str]]] = words("hf_trainer")
"""TrainingArguments for each optimizer; `adamw` is the Trainer's own default."""

LOSSES: Final = {"loss": ("plain", "liger")}
"""The network's own, or Liger's with Liger's other kernels, as `use_liger_kernel` has them all."""

EXPRESSES: Final[Mapping[str, tuple[str, ...]]] = {
    **SHAPES,
    "method": ("full", "lora", "qlora"),
    "quant": ANY,
    "unquantized_dtype": ANY,
    "lora_rank": ANY,
    "lora_dropout": ANY,
    "lora_targets": ANY,
    "precision": ("bf16-mixed", "bf16-true", "fp16-mixed", "fp32"),
    "weights_dtype": ANY,
    "base_dtype": ANY,
    "optimizer": tuple(OPTIMIZERS),
    "clip_grad_norm": ANY,
    "accum_sync": ANY,
    "checkpointing": ("none", "full", "every-N"),
    "compile": ("none", "model"),
    "activation_offload": ("none", "cpu"),
    "shard": ("none", "ddp", "zero2", "zero3", "hsdp"),
    "param_offload": ("none", "cpu"),
    "attention": ANY,
    "cp": ANY,
}

EACH_BATCH: Final = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
"""Fields of `accelerator_config` that have gradients averaged after each micro-batch."""

LAYERS: Final = "FSDP_TRANSFORMER_CLS_TO_WRAP"
"""The variable by which `accelerate launch` tells FSDP which classes of layers to divide."""


def accepts(case: Case) -> Refusal | None:
    """Return what stands against the Trainer, and against the techniques whose code it shares."""
    plan = case.plan
    return (
        refuse_undivided(plan, case.cluster)
        or _refuse_offload_alone(plan)
        or _refuse_optimizer_under_fsdp(plan)
        or refuse_sharded_files(case.job, plan)
        or refuse_resume(case, "the Trainer")
        or _refuse_resume_without_scale(case.job, plan)
        or refuse_context_parallel(plan)
        or refuse_missing_liger(plan)
        or first_of((refuse_by_techniques(case), _refuse_missing_optimizer(plan)))
    )


def _refuse_resume_without_scale(job: Job, plan: Plan) -> Refusal | None:
    """Return the refusal of resuming with fp16-mixed under FSDP2.

    torch makes FSDP2's states by a step, for which accelerate's scaler has no scale before the first loss.
    """
    if job.resume == "none" or plan.precision != "fp16-mixed" or plan.shard not in SHARDING:
        return None
    return Refusal(
        technique=f"resume={job.resume}",
        reason=f"with fp16-mixed and shard {plan.shard} the Trainer fails at it, before its scaler has a scale",
        instead="choose precision bf16-mixed, or engine accelerate",
    )


def _refuse_offload_alone(plan: Plan) -> Refusal | None:
    """Return the refusal of offloaded activations without checkpointing."""
    if plan.activation_offload != "cpu" or plan.checkpointing != "none":
        return None
    return Refusal(
        technique=f"activation-offload={plan.activation_offload}",
        reason="the Trainer moves the inputs of checkpointed layers only, and checkpointing is none",
        instead="choose checkpointing full",
    )


def _refuse_missing_optimizer(plan: Plan) -> Refusal | None:
    """Return the refusal of an optimizer whose library is not installed."""
    library = find_optimizer(plan.optimizer).library
    if library == "torch" or find_version(library) is not None:
        return None
    return Refusal(
        technique=f"optimizer={plan.optimizer}",
        reason=f"the package {library} is not installed",
        instead=f"pip install {library}",
    )


def _refuse_optimizer_under_fsdp(plan: Plan) -> Refusal | None:
    """Return the refusal of optimizers that do not take DTensors, which FSDP2 makes of parameters.

    bitsandbytes' kernels and transformers' Adafactor do not.
    """
    optimizer = find_optimizer(plan.optimizer)
    takes_dtensors = optimizer.library != "bitsandbytes" and optimizer.family != "adafactor"
    if plan.shard not in SHARDING or takes_dtensors:
        return None
    return Refusal(
        technique=f"optimizer={plan.optimizer}",
        reason=f"it fails on parameters that FSDP2 divides, and shard is {plan.shard}",
        instead="choose shard ddp, or optimizer adamw",
    )


def run(job: Job, plan: Plan, world: World, steps: int) -> object:
    """Train as in the Trainer's own examples, with made-up rows."""
    return run_trainer(job, plan, world, steps)


def run_trainer(
    job: Job,
    plan: Plan,
    world: World,
    steps: int,
    prepare: Callable[[nn.Module], nn.Module] | None = None,
    by_fsdp: bool = True,
    **more_arguments: Any,
) -> object:
    """Return the Trainer after so many steps of a network that `prepare` has changed.

    `by_fsdp`: whether FSDP checkpoints the layers that it divides, as transformers advises, or the network itself.
    `more_arguments` are further TrainingArguments.
    """
    from tonnage.trainers import common, resume
    from tonnage.trainers.hf_trainer import callbacks

    def run(job: Job, world: World, steps: int, folder: str) -> object:
        resume.check_rank(job, plan, world)
        steps = callbacks.last_step(job, steps)
        common.launch(plan, world)
        step = common.network_step(job, plan, world)
        module = common.add_adapters(common.build_network(step), step)
        if prepare is not None:
            module = prepare(module)
        if plan.shard in SHARDING and (layers := common.layers_to_wrap(module)):
            os.environ[LAYERS] = ",".join(layers)
        if plan.loss == "liger":
            check_liger(module)
        job = callbacks.with_evaluation(job, module)
        step = replace(step, job=job)
        rows = common.Rows(step, module, common.count_rows(step, steps))
        trainer_class, arguments_class = _classes(job, module)
        arguments = {**training_arguments(job, plan, world, steps, by_fsdp), **more_arguments}
        with common.contexts(step):
            trainer = trainer_class(
                model=module,
                args=arguments_class(output_dir=folder, **arguments),
                train_dataset=rows,
                eval_dataset=None if job.eval_batch is None else common.evaluation_rows(step, module),
                data_collator=common.collate,
                **callbacks.trainer_options(step, module, rows, steps),
            )
            callbacks.train(trainer, job, folder)
        return trainer

    return resume.run_with_files(job, world, steps, run, checkpoint_kind(job, plan))


def _classes(job: Job, module: nn.Module) -> tuple[Any, Any]:
    """Return the classes of the Trainer and its arguments, which are others where evaluations generate."""
    import transformers

    from tonnage.trainers.hf_trainer import callbacks

    if not callbacks.evaluates_by_generating(job, module):
        return transformers.Trainer, transformers.TrainingArguments
    arguments = partial(transformers.Seq2SeqTrainingArguments, predict_with_generate=True)
    return transformers.Seq2SeqTrainer, arguments


def training_arguments(job: Job, plan: Plan, world: World, steps: int, by_fsdp: bool = True) -> dict[str, Any]:
    """Return the TrainingArguments of a run; nothing is reported, and files are saved when `callbacks` say so."""
    from transformers import TrainingArguments

    newer = hasattr(TrainingArguments, "activation_checkpointing")
    return {
        **arguments(job, plan, "activation_checkpointing" if newer else "gradient_checkpointing", by_fsdp),
        **parallelism_settings(plan, world),
        **_files(job, plan, by_fsdp and _checkpoints_by_fsdp(plan)),
        **({} if job.eval_batch is None else {"per_device_eval_batch_size": job.eval_batch}),
        "max_steps": steps,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def _files(job: Job, plan: Plan, by_fsdp: bool) -> dict[str, Any]:
    """Return how a checkpoint is saved, and that a run that resumes is given rows for the steps that are left."""
    if (job.save_checkpoint, job.resume) == ("none", "none"):
        return {}
    sharding = _sharding(plan, by_fsdp)
    plugin = {"fsdp_config": {**sharding["fsdp_config"], **checkpoint_settings(job, plan)}} if sharding else {}
    return {"ignore_data_skip": True, **plugin}


def arguments(job: Job, plan: Plan, checkpointing: str, by_fsdp: bool = True) -> dict[str, Any]:
    """Return the TrainingArguments of a plan; `checkpointing` is the name of that argument in this version."""
    by_fsdp = by_fsdp and _checkpoints_by_fsdp(plan)
    return {
        "per_device_train_batch_size": job.micro_batch,
        "gradient_accumulation_steps": job.grad_accum,
        **({"accelerator_config": EACH_BATCH} if plan.accum_sync else {}),
        "bf16": plan.precision == "bf16-mixed",
        "fp16": plan.precision == "fp16-mixed",
        **OPTIMIZERS[plan.optimizer],
        **({} if plan.clip_grad_norm is None else {"max_grad_norm": float(plan.clip_grad_norm)}),
        **({"torch_compile": True} if plan.compile == "model" else {}),
        **({"use_liger_kernel": True} if plan.loss == "liger" else {}),
        **_checkpointing(plan, checkpointing, by_fsdp),
        **_sharding(plan, by_fsdp),
    }


def _checkpointing(plan: Plan, word: str, by_fsdp: bool) -> dict[str, Any]:
    """Return the arguments of checkpointing through the model.

    FSDP checkpoints every layer by a setting of its own, as transformers advises.
    """
    if plan.checkpointing == "none" or by_fsdp:  # SFTConfig would do both if it were not told
        return {word: False}
    options = {"every_n_layers": plan.checkpoint_interval, "offload": plan.activation_offload == "cpu" or None}
    kwargs = {name: value for name, value in options.items() if value is not None}
    if word == "gradient_checkpointing":  # whose default is torch's reentrant one, which trains no adapters
        kwargs["use_reentrant"] = False
    return {word: True, **({f"{word}_kwargs": kwargs} if kwargs else {})}


def _checkpoints_by_fsdp(plan: Plan) -> bool:
    """Return whether FSDP checkpoints the layers: it takes every layer or none, and moves nothing to the host."""
    return plan.shard in SHARDING and plan.checkpointing == "full" and plan.activation_offload == "none"


def _sharding(plan: Plan, by_fsdp: bool) -> dict[str, Any]:
    if plan.shard not in SHARDING:
        return {}
    config = {
        "reshard_after_forward": plan.shard != "zero2",
        "cpu_offload": plan.param_offload == "cpu",
        "activation_checkpointing": by_fsdp,
    }
    return {"fsdp": True, "fsdp_config": config}


HF_TRAINER_ENGINE: Final = Engine(
    name="hf-trainer",
    packages=("transformers", "accelerate"),
    expresses={
        **EXPRESSES,
        **IMAGES,
        **ROWS,
        **FILES,
        **LOSSES,
        "eval_batch": ANY,
        "eval_logits": ANY,
        "generate": ANY,
    },
    accepts=accepts,
    imports=("transformers.trainer",),
    run=run,
)
