"""Hugging Face's Trainer: TrainingArguments as JSON, a short train.py, and the launcher's command."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tonnage.mesh import SHARDING
from tonnage.trainers import job_file, launching, liger, packages
from tonnage.trainers.engine import IMAGES
from tonnage.trainers.hf_trainer.run import EXPRESSES, LAYERS, LOSSES
from tonnage.trainers.hf_trainer.run import arguments as plan_arguments
from tonnage.trainers.target import ExportRequest, Target, Written, flat, json_file

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from tonnage.job import Job
    from tonnage.plans import Plan

SOURCE: Final = ("transformers", "training_args.py", "TrainingArguments")
"""The class whose fields are read."""

PLUGIN: Final = {"reshard_after_forward", "activation_checkpointing", "cpu_offload"}
"""Keys of fsdp_config that reach accelerate's plugin under the same name; the Trainer ignores unknown ones."""

WHY: Final = {
    "checkpointing": "the Trainer checkpoints every layer or every N-th",
    "loss": "the Trainer calls the network's own loss, or Liger's",
    "activation_offload": "the Trainer moves the inputs of checkpointed layers only",
    "optimizer_in_backward": "its optimizers that do so (LOMO, layerwise GaLore and APOLLO) are others",
    "packing": "rows.py joins texts to full rows and does not say where one ends",
    "lengths": "rows.py joins texts to full rows",
    "eval_batch": "train.py evaluates nothing",
    "eval_logits": "train.py evaluates nothing",
    "generate": "train.py generates nothing",
    "precision=fp8": "it takes an fp8 recipe of accelerate, which is not the one that was run",
}


def write(request: ExportRequest) -> Written:
    """Return training_args.json, job.json and our scripts."""
    settings = arguments(request)
    job = job_file.job_settings(request)
    cluster = request.cluster
    return Written(
        files=(
            json_file("training_args.json", {"output_dir": "output", **settings}),
            json_file("job.json", job),
            *job_file.scripts(request, "hf_trainer"),
        ),
        command=launching.torchrun(cluster, "train.py", alone=request.plan.shard == "none"),
        settings={**flat(settings), **{f"job.{name}": value for name, value in flat(job).items()}},
        environment={**host_group(request), **_layers(request)},
        notes=(
            *launching.note_machines(cluster),
            *launching.note_clipping(request, "the Trainer's"),
            *((liger.NOTE,) if request.plan.loss == "liger" else ()),
            *job_file.note_rows(request),
        ),
    )


def overrides(job: Job, plan: Plan) -> Mapping[str, tuple[str, Any]]:
    """Return what the Trainer cannot do for this job, or the installed transformers does otherwise.

    Without activation_checkpointing it checkpoints every layer and keeps their inputs on the card.
    """
    forced = dict(liger.overrides(job, plan))
    if plan.checkpoint_interval is not None and not _is_newer():
        forced["checkpointing"] = ("the installed transformers checkpoints every layer or none", "full")
    if plan.activation_offload != "none" and not _is_newer():
        forced["activation_offload"] = ("the installed transformers keeps the inputs of layers on the card", "none")
    elif plan.activation_offload != "none" and plan.checkpointing == "none":
        forced["activation_offload"] = ("the Trainer moves the inputs of checkpointed layers only", "none")
    return forced


def _is_newer() -> bool:
    """Return whether the installed transformers has activation_checkpointing."""
    return "activation_checkpointing" in packages.fields(*SOURCE)


def arguments(request: ExportRequest) -> dict[str, Any]:
    """Return the TrainingArguments of a request, by the names of the installed transformers."""
    checkpointing = "activation_checkpointing" if _is_newer() else "gradient_checkpointing"
    return {**plan_arguments(request.job, request.plan, checkpointing), **_mesh(request), **_columns(request)}


def _columns(request: ExportRequest) -> dict[str, Any]:
    """Return the argument that keeps columns the network does not know, which rows.py uses to make its inputs."""
    return {"remove_unused_columns": False} if job_file.has_images(request) else {}


def _mesh(request: ExportRequest) -> dict[str, Any]:
    if request.plan.shard != "hsdp" and request.plan.cp == 1:
        return {}
    axes = request.axes
    shared = {} if request.plan.cp == 1 else {"cp_size": axes.cp}
    return {"parallelism_config": {"dp_replicate_size": axes.dp_replicate, "dp_shard_size": axes.dp_shard, **shared}}


def host_group(request: ExportRequest) -> Mapping[str, str]:
    """Return variables that `accelerate launch` sets and torchrun does not.

    Under offload norms are reduced on the host.
    """
    if request.plan.param_offload == "none":
        return {}
    return {"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "true"}


def _layers(request: ExportRequest) -> Mapping[str, str]:
    """Return the variable with the layers that FSDP divides, which the Trainer and PEFT read."""
    row = request.image_row
    if request.plan.shard not in SHARDING or row is None or not row.layers:
        return {}
    return {LAYERS: ",".join(row.layers)}


def reread(folder: Path) -> Mapping[str, Any]:
    """Return the settings that TrainingArguments, accelerate's plugin, PEFT and bitsandbytes made of the files."""
    import transformers

    settings = json.loads((folder / "training_args.json").read_text(encoding="utf-8"))
    return {**parse(settings, transformers.TrainingArguments), **job_file.reread_job(folder)}


def parse(settings: dict[str, Any], kind: type) -> dict[str, Any]:
    """Return what an object made of these arguments holds, by their names."""
    from transformers import HfArgumentParser, training_args

    training_args.is_torch_bf16_gpu_available = lambda: True  # this machine need not be the one that trains
    mesh = settings.pop("parallelism_config", None)
    if mesh is not None:
        from accelerate import ParallelismConfig

        config = ParallelismConfig(**mesh)
        mesh = {f"parallelism_config.{name}": getattr(config, name) for name in mesh}
    [parsed] = HfArgumentParser(kind).parse_dict(settings)  # type: ignore[arg-type]
    return {**{name: value for key in settings for name, value in _values(parsed, key).items()}, **(mesh or {})}


def _values(parsed: TrainingArguments, key: str) -> dict[str, Any]:
    value = getattr(parsed, key)
    if key == "fsdp_config":
        plugin = parsed.fsdp_plugin_args or {}
        return {f"{key}.{name}": plugin.get(name, False) for name in PLUGIN}
    if key == "accelerator_config":
        return {f"{key}.{name}": inner for name, inner in flat(value.to_dict()).items() if "." in name}
    if isinstance(value, dict):
        return {f"{key}.{name}": inner for name, inner in value.items()}
    return {key: getattr(value, "value", value)}


HF_TRAINER_TARGET: Final = Target(
    name="hf-trainer",
    packages=("transformers", "accelerate"),
    expresses={**EXPRESSES, **IMAGES, **LOSSES},
    overrides=overrides,
    why=WHY,
    engine="hf-trainer",
    scripted=True,
    reads_images=True,
    write=write,
    reread=reread,
)
