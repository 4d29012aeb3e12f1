"""Micro-batches other than full sequences of one length: packed documents, and lengths drawn from a list."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import torch

from tonnage.errors import CannotEstimate
from tonnage.job import LONGEST_STEPS, check_documents

if TYPE_CHECKING:
    from tonnage.job import Job
    from tonnage.step.model import Batch

IGNORED_LABEL: Final = -100

SEED: Final = 0
"""Seed of the draws: the same job gets the same lengths."""


def pack(batch: Batch, documents: int) -> Batch:
    """Return the batch with each sequence cut into `documents` of (nearly) equal length, as transformers' collators
    do.

    Positions restart at each document, and the label of its first token is ignored.  From such positions transformers
    makes a block-diagonal mask, or the lengths for kernels that take them.
    """
    if "input_ids" not in batch:
        raise CannotEstimate("Only sequences of tokens can be packed; leave packing out.")
    rows, length = batch["input_ids"].shape
    check_documents(documents, length)
    lengths = documents_of(length, documents)
    positions = torch.cat([torch.arange(length) for length in lengths])
    labels = batch["labels"].clone()
    labels[:, positions == 0] = IGNORED_LABEL
    return {**batch, "labels": labels, "position_ids": positions.expand(rows, -1).contiguous()}


def documents_of(length: int, documents: int) -> list[int]:
    """Return the lengths of `documents` of (nearly) equal length in one sequence of `length` tokens."""
    ends = [number * length // documents for number in range(documents + 1)]
    return [end - start for start, end in pairwise(ends)]


def pad(batch: Batch, lengths: Sequence[int]) -> Batch:
    """Return the batch with sequences of `lengths` tokens, padded to the longest; with a mask unless all are
    equally long.
    """
    if "input_ids" not in batch:
        raise CannotEstimate("Only sequences of tokens have lengths; leave lengths out.")
    ids = batch["input_ids"]
    if all(length == ids.shape[1] for length in lengths):
        return batch
    inside = torch.arange(ids.shape[1])[None, :] < torch.tensor(lengths)[:, None]
    labels = batch["labels"].masked_fill(~inside, IGNORED_LABEL)
    return {**batch, "input_ids": ids * inside, "labels": labels, "attention_mask": inside.long()}


def draw_lengths(job: Job) -> Iterator[tuple[int, ...]]:
    """Yield the lengths of the sequences of each micro-batch, without end.

    All sequences of the first LONGEST_STEPS steps have the largest length.
    """
    lengths = [min(int(length), job.seq_len) for length in job.lengths]
    for _ in range(LONGEST_STEPS * job.grad_accum):
        yield (max(lengths),) * job.micro_batch
    draw = random.Random(SEED)
    while True:
        yield tuple(draw.choice(lengths) for _ in range(job.micro_batch))
