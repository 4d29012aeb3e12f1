"""Calibration: the few numbers of a Software that meet measured steps best."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from benchmarks.time.rows import Row

from tonnage.timing.software import Software
from tonnage.timing.timing import time_step

CAP = 0.7
"""Above this distance (a factor of two) a row counts no more: something happened there that no mechanism here has."""

PRIOR = 0.001
"""Distance that a field's doubling must be worth, where nothing else is said."""

WITHIN = {
    **dict.fromkeys(
        (
            "data_overlap",
            "tensor_exposed",
            "sends_exposed",
            "expert_overlap",
            "far_part",
        ),
        (0.0, 1.0),
    ),
    "matmul_factor": (0.95, 2.0),
    "attention_factor": (0.8, 2.5),
    "memory_factor": (0.7, 2.5),
    "expert_factor": (0.95, 3.0),
    "fused_expert_factor": (0.95, 3.0),
    "near_part": (0.3, 1.2),
}
"""What a field can be: a part of something is within 1, and no code multiplies much faster than the fastest products
that were measured on the card."""

Weight = Callable[[Row], float]


def predicted(row: Row, software: Software) -> float:
    """Seconds of a row's step."""
    return time_step(row.shape, row.work, row.cluster, software).step_seconds


def distance(rows: Sequence[Row], software: Software, weight: Weight = lambda row: 1.0) -> float:
    """The mean of |log(predicted / measured)|, each at most CAP."""
    total = weights = 0.0
    for row in rows:
        w = weight(row)
        total += w * min(abs(math.log(predicted(row, software) / row.seconds)), CAP)
        weights += w
    return total / weights


def fit(
    rows: Sequence[Row],
    software: Software,
    names: Sequence[str],
    weight: Weight = lambda row: 1.0,
    prior: float = PRIOR,
) -> Software:
    """The software with these fields changed such that the distance is small: each in turn by a factor, ever finer.

    What the rows do not tell stays where it was: each doubling of a field costs `prior`.
    """
    start, found = software, software
    best = distance(rows, software, weight)
    step = 1.8
    while step > 1.03:
        better = False
        for name in names:
            for factor in (step, 1 / step):
                low, high = WITHIN.get(name, (0.0, math.inf))
                tried = replace(found, **{name: min(max(getattr(found, name) * factor, low), high)})
                at = distance(rows, tried, weight) + prior * _moved(start, tried, names)
                if at < best - 1e-6:
                    best, found, better = at, tried, True
                    break
        if not better:
            step = 1 + (step - 1) / 2
    return found


def _moved(start: Software, found: Software, names: Sequence[str]) -> float:
    """How far it is from the first guess: the sum of the squares of doublings."""
    ratios = [getattr(found, name) / getattr(start, name) for name in names if getattr(start, name)]
    return sum(math.log2(ratio) ** 2 for ratio in ratios)


def errors(rows: Sequence[Row], software: Software) -> list[float]:
    """Predicted / measured - 1."""
    return [predicted(row, software) / row.seconds - 1 for row in rows]


def quantile(values: Sequence[float], part: float) -> float:
    """The value below which this part of them lies."""
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def summary(found: Sequence[float]) -> dict[str, float]:
    """Rows, median and 90th percentile of the absolute errors, and the median of the signed ones."""
    if not found:
        return {"rows": 0, "median": math.nan, "p90": math.nan, "bias": math.nan}
    size = [abs(value) for value in found]
    return {"rows": len(found), "median": median(size), "p90": quantile(size, 0.9), "bias": median(found)}
