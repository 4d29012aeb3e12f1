"""The Trainers of TRL that a dry-run script may use, and the loss that they compute."""

from __future__ import annotations

from typing import Final

CLASSES: Final = ("trl.trainer.sft_trainer.SFTTrainer",)
"""Trainers whose step the engine runs."""

LOSS: Final = "chunked"
"""The loss that SFTTrainer always computes."""
