"""torch alone: a script of ours on DDP, ZeroRedundancyOptimizer or FSDP2 that does what the plan says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tonnage.mesh import SHARDING
from tonnage.trainers import launching
from tonnage.trainers.engine import ANY, IMAGES, SHAPES
from tonnage.trainers.hf_trainer.write import reread_job
from tonnage.trainers.target import Target, Wish, Written, flat

LOOPS: Final[Mapping[str, tuple[str, ...]]] = {
    **SHAPES,
    **IMAGES,
    "method": ("full", "lora", "qlora"),
    "lora_rank": ANY,
    "lora_dropout": ANY,
    "lora_targets": ANY,
    "quant": ANY,
    "unquantized_dtype": ANY,
    "precision": ("bf16-mixed", "bf16-true", "fp16-mixed", "fp32"),
    "base_dtype": ANY,
    "optimizer": (
        *("adamw", "adamw-loop", "adamw-foreach", "adamw-fused", "sgd", "sgd-plain", "adafactor", "adamw-8bit"),
        *("paged-adamw", "paged-adamw-8bit", "lion", "lion-8bit", "adamw-8bit-ao", "adamw-4bit", "adamw-fp8-ao"),
    ),
    "clip_grad_norm": ANY,
    "checkpointing": ("none", "full", "every-N", "selective"),
    "attention": ANY,
    "loss": ("plain", "chunked"),
}
"""What scripts with a loop of our own (`scripts/loop.py`) can do, whoever divides the network."""

WHY: Final = {
    "checkpointing": "the script checkpoints layers as transformers does",
    "activation_offload": "the script has no copies beside the computation",
    "loss": "the script has a plain loss and one in slices",
    "optimizer_offload": "the script keeps states with their parameters",
}


def write(wish: Wish) -> Written:
    """job.json and the script."""
    images = launching.weights_dtype(wish.job, wish.plan) if wish.plan.shard in SHARDING else None  # and no autocast
    said = {**launching.job_settings(wish, images), **loop_settings(wish), **_division(wish)}
    return Written(
        files=(
            launching.document("job.json", said),
            *launching.scripts(wish, "torchrun", "loop"),
        ),
        command=launching.torchrun(wish.cluster, "train.py", alone=wish.plan.shard == "none"),
        settings={f"job.{name}": value for name, value in flat(said).items()},
        notes=(*launching.several_machines(wish.cluster), *launching.rows(wish)),
    )


def loop_settings(wish: Wish) -> dict[str, Any]:
    """What `scripts/loop.py` and the loop itself are told."""
    plan = wish.plan
    kept = None if wish.job.method == "full" else plan.adapters_dtype(wish.job.method)
    return launching.without_defaults(
        {
            "adapters_dtype": launching.adapters_dtype(kept),
            "micro_batch": wish.job.micro_batch,
            "grad_accum": wish.job.grad_accum,
            "optimizer": plan.optimizer,
            "clip_grad_norm": None if plan.clip_grad_norm is None else float(plan.clip_grad_norm),
            "checkpointing": None if plan.checkpointing == "none" else plan.checkpointing,
            "loss": None if plan.loss == "plain" else plan.loss,
            "sync_each_batch": plan.accum_sync or None,
        }
    )


def _division(wish: Wish) -> dict[str, Any]:
    plan = wish.plan
    return launching.without_defaults(
        {
            "precision": plan.precision,
            "shard": None if plan.shard == "none" else plan.shard,
            "param_offload": plan.param_offload == "cpu" or None,
            "replicas": wish.axes.dp_replicate if plan.shard == "hsdp" else None,
            "compile": None if plan.compile == "none" else plan.compile,
        }
    )


def reread(folder: Path) -> Mapping[str, Any]:
    """Of the script's own Job, of PEFT's and bitsandbytes' configurations; that the optimizer's class is there."""
    return reread_job(folder)


TORCHRUN: Final = Target(
    name="torchrun",
    packages=("torch", "transformers"),
    expresses={
        **LOOPS,
        "precision": (*LOOPS["precision"], "fp16-true"),
        "shard": ("none", "ddp", "zero1", "zero2", "zero3", "hsdp"),
        "accum_sync": ANY,
        "param_offload": ("none", "cpu"),
        "compile": ANY,
    },
    why=WHY,
    engine="tonnage",
    scripted=True,
    sees=True,
    write=write,
    reread=reread,
)
