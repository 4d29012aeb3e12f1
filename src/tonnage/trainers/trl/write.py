"""TRL's SFTTrainer: SFTConfig as JSON, a short train.py, and the launcher's command."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tonnage.trainers import launching
from tonnage.trainers.hf_trainer import run as engine
from tonnage.trainers.hf_trainer import write as hf_trainer
from tonnage.trainers.target import Target, Wish, Written, flat

WHY: Final = {
    **hf_trainer.WHY,
    "loss": "SFTTrainer always computes the loss in slices of tokens",
    "images": "SFTTrainer makes rows of images by a processor, and a plan has none",
    "activation_offload": "of SFTConfig's activation_offloading it is not known what it needs",
}


def write(wish: Wish) -> Written:
    """sft_config.json, job.json and our scripts."""
    said = {
        **hf_trainer.arguments(wish),
        "max_length": wish.job.seq_len,
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }
    job = launching.job_settings(wish)
    return Written(
        files=(
            launching.document("sft_config.json", {"output_dir": "output", **said}),
            launching.document("job.json", job),
            *launching.scripts(wish, "trl"),
        ),
        command=launching.torchrun(wish.cluster, "train.py", alone=wish.plan.shard == "none"),
        settings={**flat(said), **{f"job.{name}": value for name, value in flat(job).items()}},
        environment=hf_trainer.host_group(wish),
        notes=(
            *launching.several_machines(wish.cluster),
            *launching.clipping(wish, "the Trainer's"),
            *launching.rows(wish),
        ),
    )


def reread(folder: Path) -> Mapping[str, Any]:
    """Of SFTConfig, as `hf_trainer` does it of TrainingArguments."""
    from trl import SFTConfig

    said = json.loads((folder / "sft_config.json").read_text(encoding="utf-8"))
    return {**hf_trainer.parsed(said, SFTConfig), **hf_trainer.reread_job(folder)}


TRL: Final = Target(
    name="trl",
    packages=("trl", "transformers", "accelerate", "datasets"),
    expresses={**engine.EXPRESSES, "loss": ("chunked",)},
    besides=hf_trainer.besides,
    why=WHY,
    engine="trl",
    scripted=True,
    write=write,
    reread=reread,
)
