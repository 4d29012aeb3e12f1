"""torch alone: a script of ours on DDP, ZeroRedundancyOptimizer or FSDP2 that does what the plan says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tonnage.catalog.optimizers import OPTIMIZERS
from tonnage.mesh import SHARDING
from tonnage.trainers import job_file, launching
from tonnage.trainers.engine import ANY, IMAGES, SHAPES
from tonnage.trainers.target import ExportRequest, Target, Written, flat, json_file, without_none

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
    "optimizer": tuple(optimizer.name for optimizer in OPTIMIZERS if not optimizer.only_matrices),
    "clip_grad_norm": ANY,
    "checkpointing": ("none", "full", "every-N", "selective"),
    "attention": ANY,
    "loss": ("plain", "chunked"),
}
"""The values that scripts with a loop of our own (`scripts/loop.py`) can do, whatever divides the network."""

WHY: Final = {
    "checkpointing": "the script checkpoints layers as transformers does",
    "activation_offload": "the script makes no copies during the computation",
    "loss": "the script has a plain loss and one in slices",
    "optimizer_offload": "the script keeps states with their parameters",
    "optimizer_in_backward": "the script updates after the last backward",
    "reduce_dtype": "the script averages gradients in the dtype that the precision says",
}


def write(request: ExportRequest) -> Written:
    """Return job.json and the script."""
    job, plan = request.job, request.plan
    images_dtype = job_file.weights_dtype(job, plan) if plan.shard in SHARDING else None  # FSDP2 has no autocast
    settings = {
        **job_file.job_settings(request, images_dtype),
        **loop_settings(request),
        **_parallelism_settings(request),
    }
    return Written(
        files=(
            json_file("job.json", settings),
            *job_file.scripts(request, "torchrun", "loop"),
        ),
        command=launching.torchrun(request.cluster, "train.py", alone=plan.shard == "none"),
        settings={f"job.{name}": value for name, value in flat(settings).items()},
        notes=(*launching.note_machines(request.cluster), *job_file.note_rows(request)),
    )


def loop_settings(request: ExportRequest) -> dict[str, Any]:
    """Return the fields of job.json that `scripts/loop.py` and the loop itself read."""
    job, plan = request.job, request.plan
    adapters = None if job.method == "full" else plan.adapters_dtype(job.method)
    return without_none(
        {
            "adapters_dtype": job_file.adapters_dtype(adapters),
            "micro_batch": job.micro_batch,
            "grad_accum": job.grad_accum,
            "optimizer": plan.optimizer,
            "clip_grad_norm": None if plan.clip_grad_norm is None else float(plan.clip_grad_norm),
            "checkpointing": None if plan.checkpointing == "none" else plan.checkpointing,
            "loss": None if plan.loss == "plain" else plan.loss,
            "sync_each_batch": plan.accum_sync or None,
        }
    )


def _parallelism_settings(request: ExportRequest) -> dict[str, Any]:
    plan = request.plan
    return without_none(
        {
            "precision": plan.precision,
            "shard": None if plan.shard == "none" else plan.shard,
            "param_offload": plan.param_offload == "cpu" or None,
            "replicas": request.axes.dp_replicate if plan.shard == "hsdp" else None,
            "compile": None if plan.compile == "none" else plan.compile,
        }
    )


def reread(folder: Path) -> Mapping[str, Any]:
    """Return the settings that the script's own Job, PEFT and bitsandbytes made of job.json."""
    return job_file.reread_job(folder)


TORCHRUN_TARGET: Final = Target(
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
    reads_images=True,
    write=write,
    reread=reread,
)
