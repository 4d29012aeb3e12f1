"""Hugging Face's Trainer with its defaults on a network from its configuration, five steps.

What optimum-benchmark's training scenario runs (optimum_benchmark/scenarios/training): rows of made-up numbers, every
argument of the Trainer but batch, steps and output left alone.  So did transformers' own examples, as run_qa.py.
"""

from __future__ import annotations

import tempfile
from functools import partialmethod
from typing import Any

import torch
import transformers
from benchmarks.accuracy.scripts import older_softmax

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
    network: str,
    config: dict[str, Any],
    inputs: dict[str, list[int]],
    micro_batch: int,
    optim: str,
    of_2021: bool = False,
) -> dict[str, int]:
    """Bytes at the peak from the loaded network on, and when the training is over.

    `inputs` has the shape of each input of one row, labels too; `of_2021`: with that year's torch, whose softmax kept
    its input and whose gradients were set to zero between steps, not freed.
    """
    if of_2021:
        older_softmax.install()
        torch.nn.Module.zero_grad = partialmethod(torch.nn.Module.zero_grad, set_to_none=False)  # type: ignore[assignment]
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
        trainer = transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=Rows(inputs),
            data_collator=transformers.default_data_collator,
        )
        trainer.train()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "after_bytes": torch.cuda.memory_allocated(),
    }
