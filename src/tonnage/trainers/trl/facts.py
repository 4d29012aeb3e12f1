"""What TRL's SFTTrainer does that a dry-run script does not say."""

from __future__ import annotations

from typing import Final

CLASSES: Final = ("trl.trainer.sft_trainer.SFTTrainer",)
"""Trainers whose step the engine runs."""

LOSS: Final = "chunked"
"""The loss that SFTTrainer always computes."""
