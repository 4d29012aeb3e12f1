"""Where the seconds of our own recorded steps went, kernel by kernel, beside what the card's tables say.

Of a few steps the recordings have every kernel.  Products and attention are compared kind by kind, which the seconds
of whole steps do not tell apart: a calibration on those alone made products too slow and passes over memory too fast.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.packed import unpack
from benchmarks.time.calibration import known
from benchmarks.time.rows import OWN, UNSEEN, Row, own

from tonnage.timing.timing import Timing, time_step

RECORDED = (OWN, UNSEEN)

PRODUCTS = ("nvjet", "gemm", "cutlass")
ATTENTION = ("sdpa", "flash", "fmha")
"""What names of kernels have in them, of either kind."""


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """A recorded step: measured seconds over what the card's tables say, by kind, and the part that no kernel ran."""

    card: str
    case: str
    products: float
    attention: float
    idle: float


def kinds() -> Iterator[Kinds]:
    """Of every step whose kernels were recorded and whose network the time model knows."""
    for path in RECORDED:
        rows = {row.raw["case"]: row for row in own(path)[0]}
        for case, kernels in _kernels(path):
            if case in rows:
                yield _compared(rows[case], kernels)


def _kernels(path: Path) -> Iterator[tuple[str, Counter[str]]]:
    with path.with_name(f"{path.stem}.events.jsonl").open() as file:
        for line in map(json.loads, file):
            if "kernels" in line:
                yield line["case"], _by_kind(unpack(line["kernels"]))


def _by_kind(columns: dict[str, Any]) -> Counter[str]:
    """Seconds."""
    found: Counter[str] = Counter()
    for number, nanoseconds in zip(columns["name"], columns["duration"], strict=True):
        found[_kind(columns["names"][number])] += nanoseconds
    return Counter({kind: value / 1e9 for kind, value in found.items()})


def _kind(name: str) -> str:
    if any(word in name for word in PRODUCTS):
        return "products"
    return "attention" if any(word in name for word in ATTENTION) else "passes"


def _compared(row: Row, kernels: Counter[str]) -> Kinds:
    return Kinds(
        card=row.cluster.device.id,
        case=row.raw["case"],
        products=kernels["products"] / _said(row, "matmul_factor"),
        attention=kernels["attention"] / _said(row, "attention_factor"),
        idle=1 - sum(kernels.values()) / row.seconds,
    )


def _said(row: Row, factor: str) -> float:
    """Seconds that the card's tables say of a kind: what a step's grow by if they count once more."""
    plain = replace(known("eager"), kernel_seconds=0.0, again_seconds=0.0)
    counted: list[dict[str, Any]] = [{factor: times} for times in (1, 2)]
    once, twice = (_on_card(time_step(row.shape, row.work, row.cluster, replace(plain, **one))) for one in counted)
    return twice - once


def _on_card(found: Timing) -> float:
    return found.compute_seconds + found.recompute_seconds
