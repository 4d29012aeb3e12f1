"""The TrainingArguments of a dry-run script, in options of Job and Plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tonnage.catalog.optimizers import words
from tonnage.trainers.hf_trainer.read import ALIASES

CLASSES: Final = ("transformers.trainer_seq2seq.Seq2SeqTrainer", "transformers.trainer.Trainer")
"""Trainers whose step the engine runs."""

OPTIMIZERS: Final[Mapping[str, str]] = {
    **{arguments["optim"]: name for name, arguments in words("hf_trainer").items() if "optim" in arguments},
    **ALIASES,
}
"""The optimizer of each `optim`."""


def checkpointing_word(settings: Mapping[str, Any]) -> str:
    """Return the name of checkpointing in the script's version of transformers, or on its command line."""
    names = ("activation_checkpointing", "gradient_checkpointing")
    return next((name for name in names if name in settings), names[1])


def checkpointing(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of checkpointing through the network; empty if it is off."""
    name = checkpointing_word(settings)
    kwargs = settings.get(f"{name}_kwargs") or {}
    if not settings.get(name):
        return {}
    every = kwargs.get("every_n_layers") or 1
    offload = {"activation_offload": "cpu"} if kwargs.get("offload") else {}
    return {"checkpointing": f"every-{every}" if every > 1 else "full", **offload}


def autocast_dtype(settings: Mapping[str, Any]) -> str | None:
    """Return the dtype of autocast; None without."""
    return "bf16" if settings.get("bf16") else "fp16" if settings.get("fp16") else None
