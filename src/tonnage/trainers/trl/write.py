"""TRL's SFTTrainer: SFTConfig as JSON, a short train.py, and the launcher's command."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tonnage.trainers import job_file, launching
from tonnage.trainers.hf_trainer import write as hf_trainer
from tonnage.trainers.hf_trainer.run import EXPRESSES
from tonnage.trainers.target import ExportRequest, Target, Written, flat, json_file

if TYPE_CHECKING:
    from tonnage.job import Job
    from tonnage.plans import Plan

WHY: Final = {
    **hf_trainer.WHY,
    "loss": "SFTTrainer always computes the loss in slices of tokens",
    "images": "SFTTrainer makes rows of images by a processor, and a plan has none",
}


ADAPTERS: Final = {"lora": "fp32", "qlora": "bf16"}
"""The dtype in which SFTTrainer makes adapters (TRL 1.16): PEFT's own, or that of the paper of QLoRA."""


def overrides(job: Job, plan: Plan) -> Mapping[str, tuple[str, Any]]:
    """Return what SFTTrainer does with adapters, whatever the plan says, and what the Trainer does."""
    forced = dict(hf_trainer.overrides(job, plan))
    made = ADAPTERS.get(job.method)
    if made is not None and plan.weights_dtype is not None:
        forced["weights_dtype"] = (f"SFTTrainer makes the adapters of {job.method} in {made}", None)
    if made == "bf16" and plan.precision == "fp16-mixed":
        why = "SFTTrainer makes the adapters of qlora in bf16, which torch's GradScaler of fp16 refuses"
        forced["precision"] = (why, "bf16-mixed")
    return forced


def write(request: ExportRequest) -> Written:
    """Return sft_config.json, job.json and our scripts."""
    settings = {
        **hf_trainer.arguments(request),
        "max_length": request.job.seq_len,
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }
    job = job_file.job_settings(request)
    return Written(
        files=(
            json_file("sft_config.json", {"output_dir": "output", **settings}),
            json_file("job.json", job),
            *job_file.scripts(request, "trl"),
        ),
        command=launching.torchrun(request.cluster, "train.py", alone=request.plan.shard == "none"),
        settings={**flat(settings), **{f"job.{name}": value for name, value in flat(job).items()}},
        environment=hf_trainer.host_group(request),
        notes=(
            *launching.note_machines(request.cluster),
            *launching.note_clipping(request, "the Trainer's"),
            *job_file.note_rows(request),
        ),
    )


def reread(folder: Path) -> Mapping[str, Any]:
    """Return the settings that SFTConfig made of the files, as `hf_trainer` does for TrainingArguments."""
    from trl import SFTConfig

    settings = json.loads((folder / "sft_config.json").read_text(encoding="utf-8"))
    return {**hf_trainer.parse(settings, SFTConfig), **job_file.reread_job(folder)}


TRL_TARGET: Final = Target(
    name="trl",
    packages=("trl", "transformers", "accelerate", "datasets"),
    expresses={**EXPRESSES, "loss": ("chunked",)},
    overrides=overrides,
    why=WHY,
    engine="trl",
    scripted=True,
    write=write,
    reread=reread,
)
