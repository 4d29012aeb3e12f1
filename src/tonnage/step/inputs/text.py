"""Sequences of token ids."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from tonnage.job import Job

Batch = dict[str, torch.Tensor]

CODEPOINTS: Final = 0x110000
"""Number of Unicode code points."""


def ids(job: Job, network: Any) -> torch.Tensor:
    """Return (micro_batch, seq_len) random ids of the text model's vocabulary."""
    return torch.randint(0, vocabulary(network.config), (job.micro_batch, job.seq_len))


def vocabulary(config: Any) -> int:
    """Return the size of the text model's vocabulary; the number of characters for one that reads them (CANINE)."""
    from tonnage.step.configuration import text_config

    return int(getattr(text_config(config), "vocab_size", None) or CODEPOINTS)


def tokens(job: Job, network: Any) -> Batch:
    """Return token ids that are their own labels, under the forward's names, and boxes if it takes them."""
    random_ids = ids(job, network)
    names = parameters(network)
    batch = {"inputs" if "input_ids" not in names and "inputs" in names else "input_ids": random_ids}
    if "labels" in names:
        batch["labels"] = random_ids.clone()
    if "bbox" in names:  # of a document's words: left, upper, right, lower
        batch["bbox"] = torch.zeros(*random_ids.shape, 4, dtype=torch.long)
    return batch


def parameters(network: Any) -> tuple[str, ...]:
    """Return the argument names of the forward of the network's class, whatever wraps it."""
    return tuple(inspect.signature(type(network).forward).parameters)
