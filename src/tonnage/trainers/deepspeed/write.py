"""DeepSpeed: ds_config.json, which Hugging Face's Trainer and accelerate take as well, and a loop of ours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tonnage.techniques import environment
from tonnage.techniques.precision import DTYPE_NAMES
from tonnage.trainers import job_file
from tonnage.trainers.deepspeed.run import EXPRESSES, PLACES, settings
from tonnage.trainers.engine import IMAGES
from tonnage.trainers.target import ExportRequest, File, Target, Written, flat, json_file, without_none

FILE: Final = "ds_config.json"

SWAP_FOLDER: Final = "swapped"
"""The folder beside the script for tensors in files."""

WHY: Final = {
    "precision=bf16-true": "its bf16 keeps fp32 weights in the optimizer",
    "optimizer": "ds_config.json names DeepSpeed's own optimizers; others are made in a script",
    "loss": "DeepSpeed calls the network's own loss",
    "checkpointing": "layers are checkpointed as transformers does",
}


def write(request: ExportRequest) -> Written:
    """Return ds_config.json, job.json and the script."""
    config = settings(request.job, request.plan, {name: {"nvme_path": SWAP_FOLDER} for name in PLACES})
    job = without_none(
        {
            **job_file.job_settings(request, DTYPE_NAMES[request.plan.compute_dtype]),  # there is no autocast
            "checkpointing": None if request.plan.checkpointing == "none" else request.plan.checkpointing,
        }
    )
    return Written(
        files=(
            json_file(FILE, config),
            json_file("job.json", job),
            *job_file.scripts(request, "deepspeed", "loop"),
            *_variables(request),
        ),
        command=("deepspeed", *_host_options(request), "--num_gpus", str(request.cluster.gpus_per_node), "train.py"),
        settings={**flat(config), **{f"job.{name}": value for name, value in flat(job).items()}},
        notes=(*_note_hosts(request), *_note_swapping(request), *job_file.note_rows(request)),
    )


def _host_options(request: ExportRequest) -> tuple[str, ...]:
    return ("--hostfile", "HOSTFILE", "--num_nodes", str(request.cluster.nodes)) if request.cluster.nodes > 1 else ()


def _variables(request: ExportRequest) -> tuple[File, ...]:
    """Return the file with the plan's environment variables, which the launcher hands to other machines."""
    variables = environment(request.plan)
    if request.cluster.nodes == 1 or not variables:
        return ()
    return (File(name=".deepspeed_env", text="".join(f"{name}={value}\n" for name, value in variables.items())),)


def _note_hosts(request: ExportRequest) -> tuple[str, ...]:
    if request.cluster.nodes == 1:
        return ()
    nodes, gpus = request.cluster.nodes, request.cluster.gpus_per_node
    return (f"HOSTFILE lists the {nodes} machines, a line each: NAME slots={gpus}.",)


def _note_swapping(request: ExportRequest) -> tuple[str, ...]:
    if "nvme" not in (request.plan.optimizer_offload, request.plan.param_offload):
        return ()
    return (
        f"nvme_path is the folder {SWAP_FOLDER}; name one on a local disk. Where a rank's part of a parameter has "
        "more than 1e8 elements, offload_param needs a buffer_size of as many.",
    )


def reread(folder: Path) -> Mapping[str, Any]:
    """Return the settings of DeepSpeedConfig, whose sections have names of their own.

    It ignores unknown keys at the top.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    parsed = DeepSpeedConfig(json.loads((folder / FILE).read_text(encoding="utf-8")))
    zero = parsed.zero_config
    settings_read = {
        "train_micro_batch_size_per_gpu": parsed.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": parsed.gradient_accumulation_steps,
        "bf16.enabled": parsed.bfloat16_config.enabled,
        "fp16.enabled": parsed.float16_config.enabled,
        "optimizer.type": {"adamw": "AdamW"}.get(parsed.optimizer_name, parsed.optimizer_name),
        **{f"optimizer.params.{name}": value for name, value in (parsed.optimizer_params or {}).items()},
        "gradient_clipping": parsed.gradient_clipping,
        "zero_optimization.stage": int(zero.stage),
    }
    for name in PLACES:
        place = getattr(zero, name)
        if place is not None:
            if place.nvme_path is not None:
                settings_read[f"zero_optimization.{name}.nvme_path"] = str(place.nvme_path)
            settings_read[f"zero_optimization.{name}.device"] = getattr(place.device, "value", place.device)
            settings_read[f"zero_optimization.{name}.pin_memory"] = place.pin_memory
    return {**settings_read, **job_file.reread_job(folder)}


DEEPSPEED_TARGET: Final = Target(
    name="deepspeed",
    packages=("deepspeed", "transformers"),
    expresses={**EXPRESSES, **IMAGES},
    why=WHY,
    engine="deepspeed",
    scripted=True,
    reads_images=True,
    write=write,
    reread=reread,
)
