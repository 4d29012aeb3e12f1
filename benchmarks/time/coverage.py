"""How often measured steps were within the interval that the time model states, by kind of job and place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.time import blind
from benchmarks.time.rows import Row

from tonnage.timing.software import Software
from tonnage.timing.timing import time_step

Judged = tuple[Row, float, Software]
"""A row, its error (predicted / measured - 1), and the Software whose interval is stated for it."""


@dataclass(frozen=True, slots=True)
class Share:
    """Steps of one kind in one place."""

    kind: str
    """`dense`, `experts` or `adapters`."""
    place: str
    """`one GPU`, `one machine` or `several machines`."""
    rows: int
    """How many."""
    inside: float
    """Part of them that took as long as stated."""


def blindly() -> list[Judged]:
    """The blind rows, by the catalog."""
    return [(row, today, blind.code_of(row)) for row, _, today in blind.answers(blind.load())]


def shares(found: Iterable[Judged]) -> list[Share]:
    """By kind and place."""
    groups: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for row, error, software in found:
        groups[_kind(row), _place(row)].append(_inside(row, error, software))
    return [Share(*key, len(inside), sum(inside) / len(inside)) for key, inside in sorted(groups.items())]


def _inside(row: Row, error: float, software: Software) -> bool:
    told = time_step(row.shape, row.work, row.cluster, software)
    return told.low_seconds <= told.step_seconds / (1 + error) <= told.high_seconds


def _kind(row: Row) -> str:
    if row.work.lora_rank:
        return "adapters"
    return "experts" if row.shape.experts else "dense"


def _place(row: Row) -> str:
    if row.cluster.gpus == 1:
        return "one GPU"
    return "one machine" if row.cluster.nodes == 1 else "several machines"
