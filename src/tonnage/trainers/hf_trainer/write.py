"""Hugging Face's Trainer: TrainingArguments as JSON, a short train.py, and the launcher's command."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tonnage.mesh import SHARDING
from tonnage.trainers import installed, launching
from tonnage.trainers.engine import IMAGES
from tonnage.trainers.hf_trainer import run as engine
from tonnage.trainers.target import Target, Wish, Written, flat

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from tonnage.job import Job
    from tonnage.plans import Plan

SOURCE: Final = ("transformers", "training_args.py", "TrainingArguments")
"""Where the fields are read."""

PLUGIN: Final = {"reshard_after_forward", "activation_checkpointing", "cpu_offload"}
"""Keys of fsdp_config that reach accelerate's plugin under the same name; others it takes and forgets."""

WHY: Final = {
    "checkpointing": "the Trainer checkpoints every layer or every N-th",
    "shard=zero1": "the Trainer divides by FSDP2 or DeepSpeed, not optimizer states alone",
    "loss": "the Trainer calls the network's own loss, or Liger's",
    "activation_offload": "the Trainer moves the inputs of checkpointed layers only",
    "optimizer_offload": "FSDP2 moves parameters and states together: param-offload cpu",
    "packing": "rows.py joins texts to full rows and does not say where one ends",
    "lengths": "rows.py joins texts to full rows",
    "eval_batch": "train.py evaluates nothing",
    "eval_logits": "train.py evaluates nothing",
    "precision=fp8": "it takes an fp8 recipe of accelerate, which is not the one that was run",
}


def write(wish: Wish) -> Written:
    """training_args.json, job.json and our scripts."""
    said = arguments(wish)
    job = launching.job_settings(wish)
    cluster = wish.cluster
    return Written(
        files=(
            launching.document("training_args.json", {"output_dir": "output", **said}),
            launching.document("job.json", job),
            *launching.scripts(wish, "hf_trainer"),
        ),
        command=launching.torchrun(cluster, "train.py", alone=wish.plan.shard == "none"),
        settings={**flat(said), **{f"job.{name}": value for name, value in flat(job).items()}},
        environment={**host_group(wish), **_layers(wish)},
        notes=(
            *launching.several_machines(cluster),
            *launching.clipping(wish, "the Trainer's"),
            *_liger(wish),
            *launching.rows(wish),
        ),
    )


def _liger(wish: Wish) -> tuple[str, ...]:
    if wish.plan.loss != "liger":
        return ()
    return ("use_liger_kernel wants the package liger-kernel, and has its other kernels run as well.",)


def besides(job: Job, plan: Plan) -> Mapping[str, tuple[str, Any]]:
    """Before activation_checkpointing there was one kind: every layer, its inputs on the card."""
    if _newer():
        return {}
    found: dict[str, tuple[str, Any]] = {}
    if plan.checkpoint_interval is not None:
        found["checkpointing"] = ("the installed transformers checkpoints every layer or none", "full")
    if plan.activation_offload != "none":
        found["activation_offload"] = ("the installed transformers keeps the inputs of layers on the card", "none")
    return found


def _newer() -> bool:
    return "activation_checkpointing" in installed.fields(*SOURCE)


def arguments(wish: Wish) -> dict[str, Any]:
    """TrainingArguments as the installed transformers calls them."""
    word = "activation_checkpointing" if _newer() else "gradient_checkpointing"
    return {**engine.arguments(wish.job, wish.plan, word), **_mesh(wish), **_columns(wish)}


def _columns(wish: Wish) -> dict[str, Any]:
    """The Trainer would take columns away that the network does not know: rows.py makes what it knows of them."""
    return {"remove_unused_columns": False} if launching.with_images(wish) else {}


def _mesh(wish: Wish) -> dict[str, Any]:
    if wish.plan.shard != "hsdp" and wish.plan.cp == 1:
        return {}
    axes = wish.axes
    shared = {} if wish.plan.cp == 1 else {"cp_size": axes.cp}
    return {"parallelism_config": {"dp_replicate_size": axes.dp_replicate, "dp_shard_size": axes.dp_shard, **shared}}


def host_group(wish: Wish) -> Mapping[str, str]:
    """What torchrun does not tell and `accelerate launch` would: norms are reduced on the host under offload."""
    if wish.plan.param_offload == "none":
        return {}
    return {"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "true"}


def _layers(wish: Wish) -> Mapping[str, str]:
    """For Trainer and PEFT alike."""
    if wish.plan.shard not in SHARDING or wish.seen is None or not wish.seen.layers:
        return {}
    return {engine.LAYERS: ",".join(wish.seen.layers)}


def reread(folder: Path) -> Mapping[str, Any]:
    """Of TrainingArguments and of what it hands to accelerate's FSDP plugin; of PEFT's and bitsandbytes' configs."""
    import transformers

    said = json.loads((folder / "training_args.json").read_text(encoding="utf-8"))
    return {**parsed(said, transformers.TrainingArguments), **reread_job(folder)}


def parsed(said: dict[str, Any], kind: type) -> dict[str, Any]:
    """What the object made of these arguments holds, by their names."""
    from transformers import HfArgumentParser, training_args

    training_args.is_torch_bf16_gpu_available = lambda: True  # this machine need not be the one that trains
    mesh = said.pop("parallelism_config", None)
    if mesh is not None:
        from accelerate import ParallelismConfig

        made = ParallelismConfig(**mesh)
        mesh = {f"parallelism_config.{name}": getattr(made, name) for name in mesh}
    [found] = HfArgumentParser(kind).parse_dict(said)  # type: ignore[arg-type]
    return {**{name: value for key in said for name, value in _held(found, key).items()}, **(mesh or {})}


def _held(found: TrainingArguments, key: str) -> dict[str, Any]:
    value = getattr(found, key)
    if key == "fsdp_config":
        plugin = found.fsdp_plugin_args or {}
        return {f"{key}.{name}": plugin.get(name, False) for name in PLUGIN}
    if key == "accelerator_config":
        return {f"{key}.{name}": inner for name, inner in flat(value.to_dict()).items() if "." in name}
    if isinstance(value, dict):
        return {f"{key}.{name}": inner for name, inner in value.items()}
    return {key: getattr(value, "value", value)}


def reread_job(folder: Path) -> dict[str, Any]:
    """job.json as our script reads it, adapters and quantization as PEFT and transformers do."""
    from dataclasses import asdict

    from tonnage.trainers.scripts import job

    read = job.read(folder)
    found = {name: value for name, value in asdict(read).items() if value is not None}
    if read.lora is not None:
        import peft

        adapters = peft.LoraConfig(**read.lora)
        found["lora"] = {name: _plain(getattr(adapters, name)) for name in read.lora}
    if read.quantization is not None:
        from transformers import BitsAndBytesConfig

        bits = BitsAndBytesConfig(**read.quantization)
        found["quantization"] = {name: _plain(getattr(bits, name)) for name in read.quantization}
    return {f"job.{name}": value for name, value in flat(found).items()}


def _plain(value: Any) -> Any:
    """Sets, enums and dtypes as JSON has them."""
    if isinstance(value, set):
        return sorted(value)
    return str(value).removeprefix("torch.") if type(value).__module__ == "torch" else getattr(value, "value", value)


HF_TRAINER: Final = Target(
    name="hf-trainer",
    packages=("transformers", "accelerate"),
    expresses={**engine.EXPRESSES, **IMAGES, **engine.LOSSES},
    besides=besides,
    why=WHY,
    engine="hf-trainer",
    scripted=True,
    sees=True,
    write=write,
    reread=reread,
)
