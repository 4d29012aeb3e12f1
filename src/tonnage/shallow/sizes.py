"""Blocks and exchanges that are larger in a deeper network: norms of all gradients, one block for all weights.

From each depth to the next their bytes grow by the same amount.  In tokens such a block has a name instead of its
bytes, a number below zero that is the same at all depths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from tonnage.recorder.tonnage_recorder.record_layout import ACTIONS
from tonnage.shallow.tokens import EXCHANGE, Place, without_layer
from tonnage.trace.trace import Trace

_ALLOC: Final = ACTIONS.index("alloc")


class Growing(NamedTuple):
    """Bytes that grow with depth."""

    place: Place
    """Phase and module that request them."""
    first: int
    """Bytes at the least of the three depths."""
    more: int
    """Bytes that each step in depth adds."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of growing blocks in three runs."""

    growing: tuple[Growing, ...]
    """The sizes in the order of their names: the first has -1, the next -2."""
    names: tuple[Mapping[tuple[Place, int], int], ...]
    """For each run the names of its sizes, by place and bytes."""

    @staticmethod
    def of(runs: Sequence[Trace]) -> Sizes:
        """Return the sizes that only one run requests at a place, as often as the others request one of theirs."""
        requested = [_requested_sizes(run) for run in runs]
        growing: list[Growing] = []
        names: tuple[dict[tuple[Place, int], int], ...] = tuple({} for _ in runs)
        for place in requested[0]:
            unique = [_unique_sizes(number, [run.get(place, {}) for run in requested]) for number in range(len(runs))]
            if len({len(sizes) for sizes in unique}) > 1:
                continue
            for sizes in zip(*unique, strict=True):
                steps = {after - before for before, after in pairwise(sizes)}
                if len(steps) == 1:
                    growing.append(Growing(place, sizes[0], *steps))
                    for names_of_run, size in zip(names, sizes, strict=True):
                        names_of_run[place, size] = -len(growing)
        return Sizes(tuple(growing), names)

    @property
    def phases(self) -> frozenset[str]:
        """Return the phases in which growing blocks are allocated."""
        return frozenset(growing.place[0] for growing in self.growing if growing.place[0] != EXCHANGE)

    def bytes(self, size: int, steps: int) -> int:
        """Return the size itself, or the bytes of the growing size with that name at `steps` beyond the least
        depth.
        """
        if size >= 0:
            return size
        growing = self.growing[-1 - size]
        return growing.first + growing.more * steps


def _unique_sizes(number: int, runs: Sequence[Mapping[int, None]]) -> list[int]:
    """Return the sizes of one run that no other has."""
    others = [run for place, run in enumerate(runs) if place != number]
    return [size for size in runs[number] if not any(size in other for other in others)]


def _requested_sizes(run: Trace) -> dict[Place, dict[int, None]]:
    """Return the sizes that are requested at each place, and exchanged, in order."""
    columns = {name: np.array(run.event_columns[name], dtype=np.int64) for name in ("action", "size", "mark")}
    latest, allocs = np.maximum.accumulate(columns["mark"]), columns["action"] == _ALLOC
    pairs = zip(latest[allocs].tolist(), columns["size"][allocs].tolist(), strict=True)
    sizes: dict[Place, dict[int, None]] = {}
    for mark, size in dict.fromkeys(pairs):
        mark_of_request = run.marks[mark]
        sizes.setdefault((mark_of_request.phase, without_layer(mark_of_request.module)[0]), {})[size] = None
    for exchange in run.activities("collective"):
        sizes.setdefault((EXCHANGE, exchange.name), {})[exchange.bytes] = None
    return sizes
