"""LLaMA-Factory: one YAML file, and accelerate's configuration where the network is divided.  Written against 0.9.5.

It loads weights in the dtype of the checkpoint and casts those that are trained to fp32, unless `pure_bf16` is set.
Layers are checkpointed unless that is disabled, by torch's reentrant implementation by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from tonnage.mesh import SHARDING
from tonnage.techniques.precision import DTYPE_NAMES
from tonnage.trainers import finetuners, launching, liger
from tonnage.trainers.accelerate import write as accelerate
from tonnage.trainers.hf_trainer.run import OPTIMIZERS
from tonnage.trainers.target import ExportRequest, Target, Written, flat, without_none

if TYPE_CHECKING:
    from tonnage.job import Job
    from tonnage.plans import Plan

FILE: Final = "llama_factory.yaml"

LAUNCHER: Final = "llamafactory.launcher"
"""The module that trains, where torchrun or accelerate starts it."""

ATTENTION: Final = {"auto": "auto", "eager": "disabled"}

CHECKPOINTED: Final[Mapping[str, Mapping[str, bool]]] = {
    "none": {"disable_gradient_checkpointing": True},
    "full": {"disable_gradient_checkpointing": False, "use_reentrant_gc": False},
    "full-reentrant": {"disable_gradient_checkpointing": False, "use_reentrant_gc": True},
}

WHY: Final = {
    "checkpointing": "LLaMA-Factory checkpoints every layer or none",
    "loss": "of losses without all logits it has Liger's",
    "unquantized_dtype": "LLaMA-Factory leaves what is not quantized as it was loaded",
    "attention": "flash_attn names packages, not torch's backends",
    "images": "LLaMA-Factory writes rows of images by a template of each family, as long as they are",
}


def overrides(job: Job, plan: Plan) -> Mapping[str, tuple[str, Any]]:
    """Return the dtype of the checkpoint for weights that are not cast to fp32 for training."""
    forced = dict(liger.overrides(job, plan))
    stored = stored_dtype(job)
    if stored is None:
        return forced
    if job.method == "lora" and stored != (plan.base_dtype or plan.compute_dtype):
        forced["base_dtype"] = (f"LLaMA-Factory loads weights as they are stored, here in {stored}", stored)
    if job.method == "full" and plan.precision == "bf16-true" and stored != "bf16":
        forced["precision"] = (f"LLaMA-Factory would train what is stored in {stored} in that dtype", "bf16-mixed")
    return forced


def stored_dtype(job: Job) -> str | None:
    """Return the dtype of the checkpoint by its configuration, as `bf16`; None where that names none."""
    config = job.model.config
    dtype = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return next((name for name, torch_name in DTYPE_NAMES.items() if torch_name == dtype), None)


def write(request: ExportRequest) -> Written:
    """Return the YAML file, with a place for the data, and accelerate.yaml for FSDP2."""
    plan_settings = settings(request)
    files = [finetuners.yaml_file(FILE, plan_settings, _data())]
    command: tuple[str, ...] = ("llamafactory-cli", "train", FILE)
    written = flat(plan_settings)
    notes = launching.note_machines(request.cluster)
    if request.plan.shard in SHARDING:
        launch = accelerate.cluster_config(request)
        files.append(accelerate.yaml_file(launch))
        command = (*accelerate.launch(request), "-m", LAUNCHER, FILE)
        written |= {f"accelerate.{name}": value for name, value in flat(launch).items()}
        notes = accelerate.note_machines(request)
    elif request.plan.shard != "none":
        command = (*launching.torchrun(request.cluster, "-m", alone=False), LAUNCHER, FILE)
    return Written(
        files=tuple(files),
        command=command,
        settings=written,
        notes=(
            *notes,
            *launching.note_clipping(request, "the Trainer's"),
            *_note_dtype(request),
            *((liger.NOTE,) if request.plan.loss == "liger" else ()),
            "DATASET in llama_factory.yaml stands for a name of your dataset_info.json.",
        ),
    )


def _note_dtype(request: ExportRequest) -> tuple[str, ...]:
    """Return the note about weights whose dtype the configuration does not name."""
    wanted = request.plan.base_dtype or request.plan.compute_dtype
    is_cast = request.job.method == "full" and request.plan.precision != "bf16-true"
    if is_cast or stored_dtype(request.job) == wanted:
        return ()
    return (f"LLaMA-Factory loads weights in the dtype of the checkpoint; the plan has {wanted}.",)


def _data() -> dict[str, Any]:
    return {
        "dataset": "DATASET",
        "dataset_dir": "data",
        "output_dir": "output",
        "num_train_epochs": 1.0,
        "learning_rate": 1e-4,
    }


def settings(request: ExportRequest) -> dict[str, Any]:
    """Return the plan's values by LLaMA-Factory's arguments."""
    job, plan = request.job, request.plan
    return without_none(
        {
            "model_name_or_path": request.model,
            **finetuners.shared_settings(request),
            "stage": "pt",
            "do_train": True,
            "finetuning_type": "full" if job.method == "full" else "lora",
            "cutoff_len": job.seq_len,
            "per_device_train_batch_size": job.micro_batch,
            "bf16": plan.precision == "bf16-mixed",
            "fp16": plan.precision == "fp16-mixed",
            "pure_bf16": plan.precision == "bf16-true",
            **OPTIMIZERS[plan.optimizer],
            **CHECKPOINTED[plan.checkpointing],
            "flash_attn": ATTENTION[plan.attention],
            "enable_liger_kernel": plan.loss == "liger",
            **_adapters(job, plan),
        }
    )


def _adapters(job: Job, plan: Plan) -> dict[str, Any]:
    if job.method == "full":
        return {}
    kind, _, double = plan.quant.partition("-")
    four = {"quantization_type": kind, "double_quantization": bool(double)}
    bits = {"quantization_bit": 8 if kind == "int8" else 4, **({} if kind == "int8" else four)}
    return {
        "lora_rank": job.lora_rank,
        "lora_target": "all" if job.lora_targets == ("all-linear",) else ",".join(job.lora_targets),
        **(bits if job.method == "qlora" else {}),
    }


def reread(folder: Path) -> Mapping[str, Any]:
    """Return the settings of its five dataclasses, which refuse unknown keys, and those of accelerate's file."""
    from llamafactory.hparams.parser import _parse_train_args
    from transformers import training_args

    training_args.is_torch_bf16_gpu_available = lambda: True  # this machine need not be the one that trains
    keys = yaml.safe_load((folder / FILE).read_text(encoding="utf-8"))
    settings_read: dict[str, Any] = {}
    for parsed in _parse_train_args(dict(keys)):
        settings_read |= {name: getattr(parsed, name) for name in keys if hasattr(parsed, name)}
    if isinstance(settings_read.get("lora_target"), list):
        settings_read["lora_target"] = ",".join(settings_read["lora_target"])
    if (folder / accelerate.FILE).exists():
        settings_read |= {f"accelerate.{name}": value for name, value in accelerate.reread_launch(folder).items()}
    return {name: getattr(value, "value", value) for name, value in settings_read.items()}


def _base_engine(plan: Plan) -> str:
    """Return the engine that has its memory.

    Under FSDP2 that is accelerate: the Trainer's engine leaves checkpointing to FSDP2, and LLaMA-Factory does not.
    """
    return "accelerate" if plan.shard in SHARDING else "hf-trainer"


LLAMA_FACTORY_TARGET: Final = Target(
    name="llama-factory",
    packages=("llamafactory",),
    expresses={
        **finetuners.EXPRESSES,
        "precision": ("bf16-mixed", "fp16-mixed", "bf16-true", "fp32"),
        "optimizer": tuple(OPTIMIZERS),
        "attention": tuple(ATTENTION),
    },
    overrides=overrides,
    why=WHY,
    base_engine=_base_engine,
    write=write,
    reread=reread,
)
