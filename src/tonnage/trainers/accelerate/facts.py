"""The Accelerator of a dry-run script, in options of Job and Plan and in names of TrainingArguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonnage.errors import CannotEstimate


def loop_settings(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return what stands for TrainingArguments in a script with a loop of its own around an Accelerator."""
    accelerator = notes["accelerator"]
    return {
        "per_device_train_batch_size": notes.get("batch", {}).get("sequences"),
        "gradient_accumulation_steps": accelerator["gradient_accumulation_steps"],
        "mixed_precision": accelerator["mixed_precision"],
        "bf16": accelerator["mixed_precision"] == "bf16",
        "fp16": accelerator["mixed_precision"] == "fp16",
        "gradient_checkpointing": bool(notes.get("network", {}).get("checkpointed")),
        "fused": bool(notes.get("optimizer", {}).get("fused")),
    }


def fsdp(notes: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the settings of its FSDP plugin; None without."""
    settings: Mapping[str, Any] | None = notes.get("accelerator", {}).get("fsdp")
    return settings


def sharding(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of how accelerate divides.  Raises CannotEstimate for another way than DDP and FSDP."""
    kind = notes.get("accelerator", {}).get("distributed", "NO")
    if kind == "NO":
        return {}
    if kind.startswith("MULTI_"):  # DDP, whatever the ranks compute on
        return {"shard": "ddp"}
    plugin = fsdp(notes)
    if kind != "FSDP" or plugin is None:
        raise CannotEstimate(f"accelerate divides by {kind}, whose settings are not among the script's own")
    keeps_layers = str(plugin["reshard_after_forward"]) in ("False", "2", "SHARD_GRAD_OP")
    offload = {"param_offload": "cpu"} if plugin["offload"] else {}
    return {"shard": "zero2" if keeps_layers else "zero3", **offload}
