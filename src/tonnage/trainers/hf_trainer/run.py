"""Hugging Face's Trainer: TrainingArguments with its own defaults, `Trainer.train()`.

What the plan has no word for stays as the Trainer has it: the loss on fp32 logits, gradients clipped at norm 1.0,
outputs cast to fp32 by accelerate, fused AdamW.  docs/reference/engines.md has what that does to memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from tonnage.errors import CannotEstimate
from tonnage.mesh import SHARDING, axes
from tonnage.techniques import chosen
from tonnage.techniques.low_bit import BITSANDBYTES
from tonnage.techniques.technique import Refusal, first_of
from tonnage.trainers.engine import ANY, FILES, IMAGES, ROWS, SHAPES, Engine, installed

if TYPE_CHECKING:
    from torch import nn

    from tonnage.case import Case
    from tonnage.cluster import Cluster
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.step.world import World

OPTIMIZERS: Final[Mapping[str, Mapping[str, str]]] = {
    "adamw": {},
    "adamw-foreach": {"optim": "adamw_torch"},
    "adamw-fused": {"optim": "adamw_torch_fused"},
    "adamw-8bit": {"optim": "adamw_bnb_8bit"},
    "adamw-8bit-ao": {"optim": "adamw_torch_8bit"},
    "adamw-4bit": {"optim": "adamw_torch_4bit"},
    "paged-adamw": {"optim": "paged_adamw_32bit"},
    "paged-adamw-8bit": {"optim": "paged_adamw_8bit"},
    "lion": {"optim": "lion_32bit"},
    "lion-8bit": {"optim": "lion_8bit"},
    "adafactor": {"optim": "adafactor"},
    "sgd": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "sgd-plain": {"optim": "sgd"},
}
"""TrainingArguments for each optimizer; `adamw` is the Trainer's own default."""

OPTIMIZER_PACKAGES: Final = {
    "adamw-8bit": "bitsandbytes",
    "adamw-8bit-ao": "torchao",
    "adamw-4bit": "torchao",
    "paged-adamw": "bitsandbytes",
    "paged-adamw-8bit": "bitsandbytes",
    "lion": "bitsandbytes",
    "lion-8bit": "bitsandbytes",
}

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
"""Of `accelerator_config`: gradients are averaged after each micro-batch."""

LAYERS: Final = "FSDP_TRANSFORMER_CLS_TO_WRAP"
"""The variable by which `accelerate launch` says which classes of layers FSDP divides."""


def accepts(case: Case) -> Refusal | None:
    """What is known of the Trainer, and of the techniques whose code it shares."""
    plan = case.plan
    return (
        alone_on_many(plan, case.cluster)
        or _nothing_to_offload(plan)
        or _optimizer_of_whole(plan)
        or parted(case.job, plan)
        or resumed(case, "the Trainer")
        or _without_a_scale(case.job, plan)
        or shared_without_fsdp(plan)
        or _liger_missing(plan)
        or first_of((shared_refusal(case), _optimizer_missing(plan)))
    )


def alone_on_many(plan: Plan, cluster: Cluster) -> Refusal | None:
    if plan.shard == "none" and cluster.gpus > 1:
        return Refusal(
            technique=f"engine={plan.engine}",
            reason=f"on {cluster.gpus} GPUs it always divides or replicates",
            instead="choose shard ddp or zero3",
        )
    return None


def shared_without_fsdp(plan: Plan) -> Refusal | None:
    if plan.cp == 1 or plan.shard in SHARDING:
        return None
    return Refusal(
        technique=f"cp={plan.cp}",
        reason=f"accelerate has ranks share sequences under FSDP2 alone, and shard is {plan.shard}",
        instead="choose shard zero3",
    )


def parted(job: Job, plan: Plan) -> Refusal | None:
    """Parts are those of FSDP2."""
    if job.save_checkpoint != "sharded" or plan.shard in SHARDING:
        return None
    return Refusal(
        technique=f"save-checkpoint={job.save_checkpoint}",
        reason=f"what shard {plan.shard} has is whole on each rank",
        instead="choose save-checkpoint full, or shard zero3",
    )


def parts_or_whole(job: Job, plan: Plan) -> str:
    """What is saved and resumed from, as in `save_checkpoint`; by default the Trainer has whole files of what FSDP2
    divides, and accelerate's own plugin parts."""
    if plan.shard not in SHARDING:
        return "full"
    if job.save_checkpoint != "none":
        return job.save_checkpoint
    return "sharded" if plan.engine == "accelerate" else "full"


def kind_of_files(job: Job, plan: Plan) -> dict[str, Any]:
    """The same in the words of its FSDP plugin, where anything is saved or resumed."""
    if (job.save_checkpoint, job.resume) == ("none", "none"):
        return {}
    return {"state_dict_type": f"{parts_or_whole(job, plan).upper()}_STATE_DICT"}


def resumed(case: Case, who: str) -> Refusal | None:
    """Where a file's states are brought is the choice of `who` (`_load_optimizer_and_scheduler`, `load_state`)."""
    place = "gpu" if case.plan.shard == "ddp" and case.cluster.gpus > 1 else "cpu"
    if case.job.resume in ("none", place):
        return None
    return Refusal(
        technique=f"resume={case.job.resume}",
        reason=f"under shard {case.plan.shard} {who} has states brought to the {place.upper()}",
        instead=f"choose resume {place}",
    )


def _without_a_scale(job: Job, plan: Plan) -> Refusal | None:
    """torch makes FSDP2's states by a step, for which accelerate's scaler has no scale before the first loss."""
    if job.resume == "none" or plan.precision != "fp16-mixed" or plan.shard not in SHARDING:
        return None
    return Refusal(
        technique=f"resume={job.resume}",
        reason=f"with fp16-mixed and shard {plan.shard} the Trainer fails at it, before its scaler has a scale",
        instead="choose precision bf16-mixed, or engine accelerate",
    )


def _nothing_to_offload(plan: Plan) -> Refusal | None:
    if plan.activation_offload != "cpu" or plan.checkpointing != "none":
        return None
    return Refusal(
        technique=f"activation-offload={plan.activation_offload}",
        reason="the Trainer moves the inputs of checkpointed layers only, and checkpointing is none",
        instead="choose checkpointing full",
    )


def _optimizer_missing(plan: Plan) -> Refusal | None:
    package = OPTIMIZER_PACKAGES.get(plan.optimizer)
    if package is None or installed(package) is not None:
        return None
    return Refusal(
        technique=f"optimizer={plan.optimizer}",
        reason=f"the package {package} is not installed",
        instead=f"pip install {package}",
    )


def _liger_missing(plan: Plan) -> Refusal | None:
    if plan.loss != "liger" or installed("liger-kernel") is not None:
        return None
    return Refusal(
        technique=f"loss={plan.loss}",
        reason="the package liger-kernel is not installed",
        instead="pip install liger-kernel, or choose loss plain",
    )


def _optimizer_of_whole(plan: Plan) -> Refusal | None:
    """bitsandbytes' kernels and transformers' Adafactor know no DTensors, which FSDP2 makes of parameters."""
    if plan.shard not in SHARDING or plan.optimizer not in (*BITSANDBYTES.classes, "adafactor"):
        return None
    return Refusal(
        technique=f"optimizer={plan.optimizer}",
        reason=f"it fails on parameters that FSDP2 divides, and shard is {plan.shard}",
        instead="choose shard ddp, or optimizer adamw",
    )


def shared_refusal(case: Case, own: tuple[str, ...] = ("optimizer", "loss")) -> Refusal | None:
    """What the plan's techniques say themselves, but for the options for which the engine has its own code."""
    asked = (technique for technique in chosen(case.job, case.plan) if technique.option not in own)
    return first_of(technique.accepts(case) for technique in asked)


def run(job: Job, plan: Plan, world: World, steps: int) -> object:
    """As in the Trainer's own examples, with made-up rows."""
    return trained(job, plan, world, steps)


def trained(
    job: Job,
    plan: Plan,
    world: World,
    steps: int,
    prepare: Callable[[nn.Module], nn.Module] | None = None,
    by_fsdp: bool = True,
    **said: Any,
) -> object:
    """The trainer after so many steps of a network that `prepare` has seen; `said`: further TrainingArguments.

    `by_fsdp`: whether FSDP checkpoints the layers that it divides, as transformers advises, or the network itself.
    """
    from tonnage.trainers import common as given
    from tonnage.trainers import resume as earlier_runs
    from tonnage.trainers.hf_trainer import callbacks

    def run(job: Job, world: World, steps: int, folder: str) -> object:
        earlier_runs.check_rank(job, plan, world)
        steps = callbacks.last_step(job, steps)
        given.launch(plan, world)
        step = given.described(job, plan, world)
        module = given.adapted(given.network(step), step)
        if prepare is not None:
            module = prepare(module)
        if plan.shard in SHARDING and (layers := given.divided(module)):
            os.environ[LAYERS] = ",".join(layers)
        if plan.loss == "liger":
            _check_liger(module)
        job = callbacks.evaluated(job, module)
        step = replace(step, job=job)
        rows = given.Rows(step, module, given.rows_needed(step, steps))
        kind, arguments = _kind(job, module)
        with given.contexts(step):
            trainer = kind(
                model=module,
                args=arguments(output_dir=folder, **{**settings(job, plan, world, steps, by_fsdp), **said}),
                train_dataset=rows,
                eval_dataset=None if job.eval_batch is None else given.evaluated(step, module),
                data_collator=given.collated,
                **callbacks.besides(step, module, rows, steps),
            )
            callbacks.train(trainer, job, folder)
        return trainer

    return earlier_runs.trained(job, world, steps, run, parts_or_whole(job, plan))


def _check_liger(module: nn.Module) -> None:
    """Raises CannotEstimate where Liger would leave the network as it is, with a line in the log."""
    from tonnage.step.model import hugging_face

    known = import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    network = hugging_face(module)
    kind = "a factory's network" if network is None else network.config.model_type
    if kind not in known:
        raise CannotEstimate(
            f"Liger has no kernels for {kind}, and the Trainer would go on without; choose loss plain."
        )


def _kind(job: Job, module: nn.Module) -> tuple[Any, Any]:
    """The Trainer and its arguments, which are others where evaluations generate."""
    import transformers

    from tonnage.trainers.hf_trainer import callbacks

    if not callbacks.writes_what_it_evaluates(job, module):
        return transformers.Trainer, transformers.TrainingArguments
    arguments = partial(transformers.Seq2SeqTrainingArguments, predict_with_generate=True)
    return transformers.Seq2SeqTrainer, arguments


def settings(job: Job, plan: Plan, world: World, steps: int, by_fsdp: bool = True) -> dict[str, Any]:
    """TrainingArguments that say what the plan says; nothing is reported, and saved when `callbacks` say so."""
    from transformers import TrainingArguments

    newer = hasattr(TrainingArguments, "activation_checkpointing")
    return {
        **arguments(job, plan, "activation_checkpointing" if newer else "gradient_checkpointing", by_fsdp),
        **mesh(plan, world),
        **_files(job, plan, by_fsdp and _by_fsdp(plan)),
        **({} if job.eval_batch is None else {"per_device_eval_batch_size": job.eval_batch}),
        "max_steps": steps,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def _files(job: Job, plan: Plan, by_fsdp: bool) -> dict[str, Any]:
    """How a checkpoint is saved, and that whoever resumes is given rows for what is left."""
    if (job.save_checkpoint, job.resume) == ("none", "none"):
        return {}
    sharding = _sharding(plan, by_fsdp)
    kind = {"fsdp_config": {**sharding["fsdp_config"], **kind_of_files(job, plan)}} if sharding else {}
    return {"ignore_data_skip": True, **kind}


def arguments(job: Job, plan: Plan, checkpointing: str, by_fsdp: bool = True) -> dict[str, Any]:
    """TrainingArguments that say what the plan says; `checkpointing` is what they call it in this version."""
    by_fsdp = by_fsdp and _by_fsdp(plan)
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
    """Through the model; under FSDP with every layer by its own setting, as transformers advises."""
    if plan.checkpointing == "none" or by_fsdp:  # SFTConfig would do both if it were not told
        return {word: False}
    wanted = {"every_n_layers": plan.checkpoint_interval, "offload": plan.activation_offload == "cpu" or None}
    said = {name: value for name, value in wanted.items() if value is not None}
    if word == "gradient_checkpointing":  # whose own way is torch's older one, which trains no adapters
        said["use_reentrant"] = False
    return {word: True, **({f"{word}_kwargs": said} if said else {})}


def _by_fsdp(plan: Plan) -> bool:
    """FSDP's own checkpointing takes every layer or none, and moves nothing to the host."""
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


def mesh(plan: Plan, world: World) -> dict[str, Any]:
    """How accelerate lays the ranks out, where that is in more than one row."""
    if plan.shard != "hsdp" and plan.cp == 1:
        return {}
    from accelerate import ParallelismConfig

    laid = axes(plan, world.size, world.gpus_per_node)
    sizes = {"dp_replicate_size": laid.dp_replicate, "dp_shard_size": laid.dp_shard, "cp_size": plan.cp}
    return {"parallelism_config": ParallelismConfig(**sizes)}


HF_TRAINER: Final = Engine(
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
