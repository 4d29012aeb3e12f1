"""LLaMA-Factory: one YAML, and accelerate's configuration where the network is divided.  Against its 0.9.5.

It loads weights in bf16 and casts those that are trained to fp32, unless `pure_bf16` is set; layers are checkpointed
unless that is disabled, in torch's older way unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from tonnage.engines.engine import ANY, SHAPES
from tonnage.engines.hf_trainer import OPTIMIZERS, SHARDED
from tonnage.exports import accelerate
from tonnage.exports.export import File, Target, Wish, Written, flat
from tonnage.exports.launching import several_machines, without_defaults

if TYPE_CHECKING:
    from tonnage.job import Job
    from tonnage.plans import Plan

FILE: Final = "llama_factory.yaml"

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
    "shard=zero1": "it divides by FSDP2 or DeepSpeed, not optimizer states alone",
}


def besides(job: Job, plan: Plan) -> Mapping[str, tuple[str, Any]]:
    """The dtype of frozen weights is that of computation."""
    if plan.base_dtype not in (None, plan.compute_dtype):
        return {"base_dtype": ("LLaMA-Factory loads frozen weights in the dtype of computation", None)}
    return {}


def write(wish: Wish) -> Written:
    """The YAML, with a place for the data; accelerate.yaml for FSDP2."""
    said = settings(wish)
    files = [File(name=FILE, text=yaml.safe_dump({**said, **_data()}, sort_keys=False))]
    command: tuple[str, ...] = ("llamafactory-cli", "train", FILE)
    found = flat(said)
    notes = several_machines(wish.cluster)
    if wish.plan.shard in SHARDED:
        launch = accelerate.settings(wish)
        files.append(accelerate.file(launch))
        command = (*accelerate.launch(wish), "-m", "llamafactory.launcher", FILE)
        found |= {f"accelerate.{name}": value for name, value in flat(launch).items()}
        notes = accelerate.machines(wish)
    return Written(
        files=tuple(files),
        command=command,
        settings=found,
        environment={"FORCE_TORCHRUN": "1"} if wish.plan.shard == "ddp" else {},
        notes=(*notes, "DATASET in llama_factory.yaml stands for a name of your dataset_info.json."),
    )


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
    return without_defaults(
        {
            "model_name_or_path": wish.model,
            "stage": "pt",
            "do_train": True,
            "finetuning_type": "full" if job.method == "full" else "lora",
            "cutoff_len": job.seq_len,
            "per_device_train_batch_size": job.micro_batch,
            "gradient_accumulation_steps": job.grad_accum,
            "bf16": plan.precision == "bf16-mixed",
            "fp16": plan.precision == "fp16-mixed",
            "pure_bf16": plan.precision == "bf16-true",
            **OPTIMIZERS[plan.optimizer],
            "max_grad_norm": None if plan.clip_grad_norm is None else float(plan.clip_grad_norm),
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
        "lora_alpha": 2 * job.lora_rank,
        "lora_dropout": job.lora_dropout,
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


LLAMA_FACTORY: Final = Target(
    name="llama-factory",
    packages=("llamafactory",),
    expresses={
        **SHAPES,
        "method": ("full", "lora", "qlora"),
        "lora_rank": ANY,
        "lora_dropout": ANY,
        "lora_targets": ANY,
        "quant": ANY,
        "unquantized_dtype": ("compute",),
        "precision": ("bf16-mixed", "fp16-mixed", "bf16-true", "fp32"),
        "base_dtype": ANY,
        "optimizer": tuple(OPTIMIZERS),
        "clip_grad_norm": ANY,
        "checkpointing": tuple(CHECKPOINTED),
        "shard": ("none", "ddp", *SHARDED),
        "param_offload": ("none", "cpu"),
        "attention": tuple(ATTENTION),
        "loss": ("plain", "liger"),
    },
    besides=besides,
    why=WHY,
    write=write,
    reread=reread,
)
