"""DeepSpeed: ds_config.json, which Hugging Face's Trainer and accelerate take as well, and a loop of ours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tonnage.techniques.precision import DTYPE_NAMES
from tonnage.trainers import launching
from tonnage.trainers.deepspeed import run as engine
from tonnage.trainers.engine import IMAGES
from tonnage.trainers.hf_trainer.write import reread_job
from tonnage.trainers.target import Target, Wish, Written, flat

FILE: Final = "ds_config.json"

FILES: Final = "swapped"
"""The folder beside the script for tensors in files."""

WHY: Final = {
    "precision=bf16-true": "DeepSpeed's bf16 keeps fp32 weights in its optimizer",
    "shard=hsdp": "its stages divide over all ranks",
    "optimizer": "ds_config.json names DeepSpeed's own optimizers; others are made in a script",
    "loss": "DeepSpeed calls the network's own loss",
    "checkpointing": "layers are checkpointed as transformers does",
}


def write(wish: Wish) -> Written:
    """ds_config.json, job.json and the script."""
    said = engine.settings(wish.job, wish.plan, {name: {"nvme_path": FILES} for name in engine.PLACES})
    job = launching.without_defaults(
        {
            **launching.job_settings(wish, DTYPE_NAMES[wish.plan.compute_dtype]),  # there is no autocast
            "checkpointing": None if wish.plan.checkpointing == "none" else wish.plan.checkpointing,
        }
    )
    return Written(
        files=(
            launching.document(FILE, said),
            launching.document("job.json", job),
            *launching.scripts(wish, "deepspeed", "loop"),
        ),
        command=("deepspeed", *_machines(wish), "--num_gpus", str(wish.cluster.gpus_per_node), "train.py"),
        settings={**flat(said), **{f"job.{name}": value for name, value in flat(job).items()}},
        notes=(*_hosts(wish), *_folder(wish), *launching.rows(wish)),
    )


def _machines(wish: Wish) -> tuple[str, ...]:
    return ("--hostfile", "HOSTFILE", "--num_nodes", str(wish.cluster.nodes)) if wish.cluster.nodes > 1 else ()


def _hosts(wish: Wish) -> tuple[str, ...]:
    if wish.cluster.nodes == 1:
        return ()
    return (
        f"HOSTFILE lists the {wish.cluster.nodes} machines, a line each: NAME slots={wish.cluster.gpus_per_node}.",
    )


def _folder(wish: Wish) -> tuple[str, ...]:
    if "nvme" not in (wish.plan.optimizer_offload, wish.plan.param_offload):
        return ()
    return (
        f"nvme_path is the folder {FILES}; name one on a local disk. Where a rank's part of a parameter has more "
        "than 1e8 elements, offload_param wants a buffer_size of as many.",
    )


def reread(folder: Path) -> Mapping[str, Any]:
    """Of DeepSpeedConfig, whose parts have names of their own; unknown keys at the top it takes silently."""
    from deepspeed.runtime.config import DeepSpeedConfig

    made = DeepSpeedConfig(json.loads((folder / FILE).read_text(encoding="utf-8")))
    zero = made.zero_config
    found = {
        "train_micro_batch_size_per_gpu": made.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": made.gradient_accumulation_steps,
        "bf16.enabled": made.bfloat16_config.enabled,
        "fp16.enabled": made.float16_config.enabled,
        "optimizer.type": {"adamw": "AdamW"}.get(made.optimizer_name, made.optimizer_name),
        **{f"optimizer.params.{name}": value for name, value in (made.optimizer_params or {}).items()},
        "gradient_clipping": made.gradient_clipping,
        "zero_optimization.stage": int(zero.stage),
    }
    for name in engine.PLACES:
        place = getattr(zero, name)
        if place is not None:
            if place.nvme_path is not None:
                found[f"zero_optimization.{name}.nvme_path"] = str(place.nvme_path)
            found[f"zero_optimization.{name}.device"] = getattr(place.device, "value", place.device)
            found[f"zero_optimization.{name}.pin_memory"] = place.pin_memory
    return {**found, **reread_job(folder)}


DEEPSPEED: Final = Target(
    name="deepspeed",
    packages=("deepspeed", "transformers"),
    expresses={**engine.EXPRESSES, **IMAGES},
    why=WHY,
    engine="deepspeed",
    scripted=True,
    sees=True,
    write=write,
    reread=reread,
)
