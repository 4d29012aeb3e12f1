"""Blocks and exchanges that are larger in a deeper network: norms of all gradients, one block for all weights.

Between three depths their bytes grow by as much from each to the next.  In tokens such a block has a name in place of
its bytes, a number below zero that is the same at all depths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from tonnage.recorder.tonnage_recorder.layout import ACTIONS
from tonnage.shallow.tokens import EXCHANGE, Place, without_layer
from tonnage.trace.trace import Trace

_ALLOC: Final = ACTIONS.index("alloc")


class Growing(NamedTuple):
    """Bytes that grow with depth."""

    place: Place
    """Where they are asked for."""
    first: int
    """At the least of the three depths."""
    more: int
    """What each step in depth adds."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of blocks that grow, of three runs."""

    found: tuple[Growing, ...]
    """By name: the first has -1, the next -2."""
    names: tuple[Mapping[tuple[Place, int], int], ...]
    """For each run the names of its sizes, by where they were asked for."""

    @staticmethod
    def of(runs: Sequence[Trace]) -> Sizes:
        """Those that only one of the runs asks for in a place, as often as the others ask for one of theirs."""
        asked = [_asked(run) for run in runs]
        found: list[Growing] = []
        names: tuple[dict[tuple[Place, int], int], ...] = tuple({} for _ in runs)
        for place in asked[0]:
            own = [_own(number, [each.get(place, {}) for each in asked]) for number in range(len(runs))]
            if len({len(sizes) for sizes in own}) > 1:
                continue
            for sizes in zip(*own, strict=True):
                steps = {after - before for before, after in pairwise(sizes)}
                if len(steps) == 1:
                    found.append(Growing(place, sizes[0], *steps))
                    for run, size in zip(names, sizes, strict=True):
                        run[place, size] = -len(found)
        return Sizes(tuple(found), names)

    @property
    def phases(self) -> frozenset[str]:
        """In which they are handed out."""
        return frozenset(growing.place[0] for growing in self.found if growing.place[0] != EXCHANGE)

    def bytes(self, size: int, steps: int) -> int:
        """Of a size, or of the one that has this name, so many steps in depth beyond the least."""
        if size >= 0:
            return size
        growing = self.found[-1 - size]
        return growing.first + growing.more * steps


def _own(number: int, runs: Sequence[Mapping[int, None]]) -> list[int]:
    """The sizes of one run that no other has."""
    others = [run for place, run in enumerate(runs) if place != number]
    return [size for size in runs[number] if not any(size in other for other in others)]


def _asked(run: Trace) -> dict[Place, dict[int, None]]:
    """The sizes that are asked for in each place, and exchanged, in order."""
    columns = {name: np.array(run.event_columns[name], dtype=np.int64) for name in ("action", "size", "mark")}
    latest, allocs = np.maximum.accumulate(columns["mark"]), columns["action"] == _ALLOC
    pairs = zip(latest[allocs].tolist(), columns["size"][allocs].tolist(), strict=True)
    found: dict[Place, dict[int, None]] = {}
    for mark, size in dict.fromkeys(pairs):
        at = run.marks[mark]
        found.setdefault((at.phase, without_layer(at.module)[0]), {})[size] = None
    for exchange in run.activities("collective"):
        found.setdefault((EXCHANGE, exchange.name), {})[exchange.bytes] = None
    return found
