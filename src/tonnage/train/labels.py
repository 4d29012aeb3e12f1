"""Labels of micro-batches: how many the loss averages over, and what each micro-batch's share of a step is.

A step's loss is the mean over all its labels.  Each forward returns the mean over the labels of one micro-batch, so
that it is divided by (all labels of the step) / (labels of the micro-batch): with 30 and 10 labels by 4/3 and 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from tonnage.errors import TonnageError, UsageError
from tonnage.job import IGNORED_LABEL
from tonnage.step.model import Batch, network_and_task

SHIFTING: Final = ("causal-lm", "image-text-to-text")
"""Tasks whose networks predict each label from the tokens before it, so that the first label of a row is not used."""

_BEFORE_SHIFT: Final = "labels"
_SHIFTED: Final = "shift_labels"


def shifts_labels(module: nn.Module) -> bool:
    """Return True if the network's loss leaves out the first label of each row; False for networks unknown here."""
    try:
        return network_and_task(module)[1] in SHIFTING
    except TonnageError:
        return False


def count_labels(batch: Batch, *, shifts: bool) -> int:
    """Return the number of labels that the loss averages over; without labels that of rows."""
    labels = _labels_of(batch)
    if labels is None:
        return len(next(iter(batch.values())))
    return int((_used_labels(batch, shifts=shifts) != IGNORED_LABEL).sum())


def with_a_label(batch: Batch, *, shifts: bool) -> Batch:
    """Return a batch without labels with one made-up label.

    The mean over no labels is not a number, in the loss and in every gradient.  The mean over a made-up one is
    finite, and the step divides it by infinity.
    """
    labels = _labels_of(batch)
    if labels is None or count_labels(batch, shifts=shifts):
        return batch
    if labels.numel() == 0 or _used_labels(batch, shifts=shifts).numel() == 0:
        raise UsageError("A micro-batch has no token that the loss could predict; leave it out.")
    name = _SHIFTED if _SHIFTED in batch else _BEFORE_SHIFT
    filled = labels.clone()
    filled.view(-1)[-1] = 0
    return {**batch, name: filled}


def divisors(counts: Sequence[int], total: int, ranks: int) -> tuple[float, ...]:
    """Return the divisor of each micro-batch's loss; the gradients are then averaged over the ranks."""
    return tuple(total / (ranks * count) if count else math.inf for count in counts)


def sum_over_ranks(number: float, device: torch.device, group: Any) -> float:
    """Return the sum of the ranks' numbers; `group` is None for a single rank."""
    return sum_each_over_ranks([number], device, group)[0]


def sum_each_over_ranks(numbers: Sequence[float], device: torch.device, group: Any) -> list[float]:
    """Return the sum of each of the ranks' numbers, in one exchange; `group` is None for a single rank."""
    if group is None:
        return [*numbers]
    summed = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(summed, group=group)
    sums: list[float] = summed.tolist()
    return sums


def _labels_of(batch: Batch) -> torch.Tensor | None:
    """Return the labels, one for each token or row; None where the batch has none of that kind."""
    labels = batch.get(_SHIFTED, batch.get(_BEFORE_SHIFT))
    is_class = isinstance(labels, torch.Tensor) and not labels.is_floating_point()
    return labels if is_class else None


def _used_labels(batch: Batch, *, shifts: bool) -> torch.Tensor:
    labels = _labels_of(batch)
    assert labels is not None
    return labels[..., 1:] if shifts and _SHIFTED not in batch else labels
