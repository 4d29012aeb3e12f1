"""Hugging Face's Trainer with its defaults on a network from its configuration, five steps.

What optimum-benchmark's training scenario runs (optimum_benchmark/scenarios/training): rows of made-up numbers, every
argument of the Trainer but batch, steps and output left alone.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import transformers

IMPORTS = ("transformers.trainer", "accelerate")


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Equal rows, one tensor for each input."""

    def __init__(self, shapes: dict[str, list[int]]) -> None:
        self.row = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.row


def measure(
    network: str, config: dict[str, Any], inputs: dict[str, list[int]], micro_batch: int, optim: str
) -> dict[str, int]:
    """Bytes at the peak from the loaded network on; `inputs` has the shape of each input of one row, labels too."""
    kind = getattr(transformers, network)
    with torch.device("cuda"):
        model = kind._from_config(kind.config_class(**config))
    torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=micro_batch,
            max_steps=5,
            save_strategy="no",
            report_to="none",
            optim=optim,
            disable_tqdm=True,
        )
        transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=Rows(inputs),
            data_collator=transformers.default_data_collator,
        ).train()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }
