"""The common part of axolotl and LLaMA-Factory: one YAML file around Hugging Face's Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import yaml

from tonnage.mesh import SHARDING
from tonnage.trainers.engine import ANY, SHAPES
from tonnage.trainers.target import ExportRequest, File

EXPRESSES: Final[Mapping[str, tuple[str, ...]]] = {
    **SHAPES,
    "method": ("full", "lora", "qlora"),
    "lora_rank": ANY,
    "lora_dropout": ANY,
    "lora_targets": ANY,
    "quant": ANY,
    "unquantized_dtype": ("compute",),
    "base_dtype": ANY,
    "clip_grad_norm": ANY,
    "checkpointing": ("none", "full", "full-reentrant"),
    "shard": ("none", "ddp", *SHARDING),
    "param_offload": ("none", "cpu"),
    "loss": ("plain", "liger"),
    "compile": ("none", "model"),
}
"""The values that both have settings for."""


def yaml_file(name: str, *parts: Mapping[str, Any]) -> File:
    """Return the YAML file of these settings."""
    settings = {key: value for part in parts for key, value in part.items()}
    return File(name=name, text=yaml.safe_dump(settings, sort_keys=False))


def shared_settings(request: ExportRequest) -> dict[str, Any]:
    """Return the settings that have the same names in both."""
    job, plan = request.job, request.plan
    lora = {"lora_alpha": 2 * job.lora_rank, "lora_dropout": job.lora_dropout} if job.method != "full" else {}
    return {
        "gradient_accumulation_steps": job.grad_accum,
        "max_grad_norm": None if plan.clip_grad_norm is None else float(plan.clip_grad_norm),
        **({"torch_compile": True} if plan.compile == "model" else {}),
        **lora,
    }
