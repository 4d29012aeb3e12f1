"""LLaMA-Factory: one YAML, and accelerate's configuration where the network is divided.  Against its 0.9.5.

It loads weights in the dtype of the checkpoint and casts those that are trained to fp32, unless `pure_bf16` is set;
layers are checkpointed unless that is disabled, in torch's older way unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from tonnage.mesh import SHARDING
from tonnage.techniques.precision import DTYPE_NAMES
from tonnage.trainers import finetuners, launching
from tonnage.trainers.accelerate import write as accelerate
from tonnage.trainers.hf_trainer.run import OPTIMIZERS
from tonnage.trainers.target import Target, Wish, Written, flat

if TYPE_CHECKING:
    from tonnage.job import Job
    from tonnage.plans import Plan

FILE: Final = "llama_factory.yaml"

LAUNCHER: Final = "llamafactory.launcher"
"""The module that trains, where others start it."""

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
    "shard=zero1": "it divides by FSDP2 or DeepSpeed, not optimizer states alone",
}


def besides(job: Job, plan: Plan) -> Mapping[str, tuple[str, Any]]:
    """Weights that are not cast to fp32 for training have the dtype of the checkpoint."""
    stored = stored_dtype(job)
    if stored is None:
        return {}
    if job.method == "lora" and stored != (plan.base_dtype or plan.compute_dtype):
        return {"base_dtype": (f"LLaMA-Factory loads weights as they are stored, here in {stored}", stored)}
    if job.method == "full" and plan.precision == "bf16-true" and stored != "bf16":
        return {"precision": (f"LLaMA-Factory would train what is stored in {stored} in that dtype", "bf16-mixed")}
    return {}


def stored_dtype(job: Job) -> str | None:
    """The dtype of the checkpoint, by its configuration: `bf16`; None where that says nothing."""
    config = job.model.config
    said = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return next((name for name, full in DTYPE_NAMES.items() if full == said), None)


def write(wish: Wish) -> Written:
    """The YAML, with a place for the data; accelerate.yaml for FSDP2."""
    said = settings(wish)
    files = [finetuners.file(FILE, said, _data())]
    command: tuple[str, ...] = ("llamafactory-cli", "train", FILE)
    found = flat(said)
    notes = launching.several_machines(wish.cluster)
    if wish.plan.shard in SHARDING:
        launch = accelerate.settings(wish)
        files.append(accelerate.file(launch))
        command = (*accelerate.launch(wish), "-m", LAUNCHER, FILE)
        found |= {f"accelerate.{name}": value for name, value in flat(launch).items()}
        notes = accelerate.machines(wish)
    elif wish.plan.shard != "none":
        command = (*launching.torchrun(wish.cluster, "-m", alone=False), LAUNCHER, FILE)
    return Written(
        files=tuple(files),
        command=command,
        settings=found,
        notes=(
            *notes,
            *launching.clipping(wish, "the Trainer's"),
            *_as_stored(wish),
            "DATASET in llama_factory.yaml stands for a name of your dataset_info.json.",
        ),
    )


def _as_stored(wish: Wish) -> tuple[str, ...]:
    """What nobody can tell from here."""
    wanted = wish.plan.base_dtype or wish.plan.compute_dtype
    cast = wish.job.method == "full" and wish.plan.precision != "bf16-true"
    if cast or stored_dtype(wish.job) == wanted:
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


def settings(wish: Wish) -> dict[str, Any]:
    """What the plan says, by LLaMA-Factory's arguments."""
    job, plan = wish.job, wish.plan
    return launching.without_defaults(
        {
            "model_name_or_path": wish.model,
            **finetuners.shared(wish),
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
    """Of its five dataclasses, which take no key that none of them has, and of accelerate's file."""
    from llamafactory.hparams.parser import _parse_train_args
    from transformers import training_args

    training_args.is_torch_bf16_gpu_available = lambda: True  # this machine need not be the one that trains
    said = yaml.safe_load((folder / FILE).read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    for made in _parse_train_args(dict(said)):
        found |= {name: getattr(made, name) for name in said if hasattr(made, name)}
    if isinstance(found.get("lora_target"), list):
        found["lora_target"] = ",".join(found["lora_target"])
    if (folder / accelerate.FILE).exists():
        found |= {f"accelerate.{name}": value for name, value in accelerate.reread_launch(folder).items()}
    return {name: getattr(value, "value", value) for name, value in found.items()}


def _beneath(plan: Plan) -> str:
    """The engine that has its memory; the Trainer's own leaves checkpointing to FSDP2, and it does not."""
    return "accelerate" if plan.shard in SHARDING else "hf-trainer"


LLAMA_FACTORY: Final = Target(
    name="llama-factory",
    packages=("llamafactory",),
    expresses={
        **finetuners.EXPRESSES,
        "precision": ("bf16-mixed", "fp16-mixed", "bf16-true", "fp32"),
        "optimizer": tuple(OPTIMIZERS),
        "attention": tuple(ATTENTION),
    },
    besides=besides,
    why=WHY,
    beneath=_beneath,
    write=write,
    reread=reread,
)
