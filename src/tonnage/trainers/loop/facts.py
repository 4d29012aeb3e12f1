"""A loop without a library's Trainer or Accelerator, as its steps were seen, in names of TrainingArguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def settings(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return what stands for TrainingArguments; what was not seen is left out."""
    network = notes.get("network")
    found = {
        "per_device_train_batch_size": notes.get("rows"),
        "gradient_accumulation_steps": notes.get("passes_a_step") or None,
        "gradient_checkpointing": None if network is None else bool(network.get("checkpointed")),
    }
    return {name: value for name, value in found.items() if value is not None}
