"""Sequences of token ids."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from tonnage.job import Job

Batch = dict[str, torch.Tensor]

CODEPOINTS: Final = 0x110000
"""Characters of Unicode."""


def ids(job: Job, network: Any) -> torch.Tensor:
    """(micro_batch, seq_len) made-up ids of the text model's vocabulary."""
    return torch.randint(0, vocabulary(network.config), (job.micro_batch, job.seq_len))


def vocabulary(config: Any) -> int:
    """How many token ids the text model knows; of one that reads characters (CANINE), how many there are."""
    from tonnage.step.configuration import text_config

    return int(getattr(text_config(config), "vocab_size", None) or CODEPOINTS)


def tokens(job: Job, network: Any) -> Batch:
    """Token ids that are their own labels, under the names that the forward has for them, and where they stand."""
    made = ids(job, network)
    wanted = parameters(network)
    batch = {"inputs" if "input_ids" not in wanted and "inputs" in wanted else "input_ids": made}
    if "labels" in wanted:
        batch["labels"] = made.clone()
    if "bbox" in wanted:  # of a document's words: left, upper, right, lower
        batch["bbox"] = torch.zeros(*made.shape, 4, dtype=torch.long)
    return batch


def parameters(network: Any) -> tuple[str, ...]:
    """The names that the forward of the network's class takes, whatever was put around it."""
    return tuple(inspect.signature(type(network).forward).parameters)
