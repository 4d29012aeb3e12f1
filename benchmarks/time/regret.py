"""How much of the best measured throughput our picks reach, on the grid of the ultrascale playbook.

A cell is a model on a number of GPUs; its candidates are all configurations of the grid, those that crashed among
them. Ours are those that fit by our own account of memory: the first has the highest speed to be expected, each
further one adds most to the best of those before it.  A pick that crashed reaches nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import log, sqrt
from statistics import NormalDist, mean, median

from benchmarks.time.alternatives import Prospect, best_set
from benchmarks.time.fit import predicted
from benchmarks.time.rows import Row

from tonnage.catalog.overheads import overheads
from tonnage.timing.memory import estimate_bytes
from tonnage.timing.pipeline import split_network
from tonnage.timing.software import Software

FRAGMENTATION = 1.18
"""Reserved / allocated memory to be prepared for: the median of published pairs is 1.10 to 1.12, the most 1.18 to
1.22 (Mist's 26 runs, Aceso's 37)."""


SPREAD = 0.14
"""Of the logarithm of measured / predicted memory: 8 of 10 are within 1.02 and 1.46 (docs/reference/time.md)."""

MOST = 0.95
"""Fullest that a pick may be by our account: it then fits with two chances in three."""

TIED_PART = 0.35
"""Part of the pipelines that ran, whatever their memory, where the head is the embedding and gradients are averaged
among several ranks (ZeRO-0): 16 of 47 of the grid; of all other layouts that fit 639 of 663 did."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A configuration of the grid; what was run more than once, with the median of its speeds."""

    row: Row
    """One of its runs."""
    speed: float
    """Tokens per second of a GPU; 0: every run crashed."""


def candidates(rows: Sequence[Row]) -> dict[tuple[str, int], list[Candidate]]:
    """The grid by cell, without cells in which nothing ran."""
    runs: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        work = row.work
        runs[row.model, row.cluster.gpus, work.axes, work.micro_batch, work.grad_accum, work.shard].append(row)
    cells: dict[tuple[str, int], list[Candidate]] = defaultdict(list)
    for same in runs.values():
        speeds = [row.work.step_tokens / row.seconds / row.cluster.gpus for row in same if row.ran]
        cells[same[0].model, same[0].cluster.gpus].append(
            Candidate(row=same[0], speed=median(speeds) if speeds else 0.0)
        )
    return {cell: found for cell, found in sorted(cells.items()) if any(one.speed for one in found)}


def fullness(row: Row, software: Software) -> float:
    """Memory needed by our account, relative to the card's; above 1 where a stage has no part of the network."""
    split = split_network(row.shape, row.work, software)
    if not split.filled:
        return 2.0
    axes = row.work.axes
    groups = [ranks for ranks in (axes.tp, axes.pp, axes.data_parallel) if ranks > 1]
    outside = overheads(row.cluster.device, groups, gpus_per_node=row.cluster.gpus_per_node).bytes
    needed = estimate_bytes(row.shape, row.work, split, main_weights=True) * FRAGMENTATION + outside
    return needed / row.cluster.device.capacity_bytes


def runs(row: Row, software: Software) -> float:
    """The chance that a layout runs: that its memory is at most the card's, as far as our account can be off."""
    axes = row.work.axes
    averaged = row.work.shard == "ddp" and axes.pp > 1 and axes.data_parallel > 1
    fits = NormalDist(sigma=SPREAD).cdf(-log(fullness(row, software)))
    return fits * (TIED_PART if averaged and row.shape.tied else 1.0)


def stalling(software: Software) -> Software:
    """The same code as it is where every exchange between machines stalls."""
    return replace(software, crowded_ranks=1)


def calm(software: Software) -> Software:
    """The same code as it is where none does."""
    return replace(software, crowded_ranks=0, crowded_tensor_ranks=0)


@dataclass(frozen=True, kw_only=True)
class Stalls:
    """Chances that the exchanges of a run stall, from runs of other networks."""

    per_machine: float = 0.0
    """Of a pipeline over machines, for each of them; where the code stalls as a rule it is certain."""

    def of(self, row: Row, software: Software) -> float:
        """The chance of one layout."""
        if _stalls_as_a_rule(row, software):
            return 1.0
        return 1 - (1 - self.per_machine) ** row.cluster.nodes if _may_stall(row) else 0.0

    @staticmethod
    def seen(rows: Iterable[Row], software: Software) -> Stalls:
        """Of runs of which it can be told, because a stall takes half of the calm seconds at least: a run stalled if
        it is nearer to the seconds with stalls than to those without."""
        stalled = machines = 0
        for row in rows:
            if not row.ran or _stalls_as_a_rule(row, software) or not _may_stall(row):
                continue
            quiet, slow = predicted(row, calm(software)), predicted(row, stalling(software))
            if slow > 1.5 * quiet:
                stalled += row.seconds > sqrt(quiet * slow)
                machines += row.cluster.nodes
        return Stalls(per_machine=stalled / max(machines, 1))


def _stalls_as_a_rule(row: Row, software: Software) -> bool:
    """On so many ranks, and pipelines with so wide tensor parallelism."""
    axes = row.work.axes
    many = 0 < software.crowded_ranks <= axes.ranks
    return many or (axes.pp > 1 and 0 < software.crowded_tensor_ranks <= axes.tp)


def _may_stall(row: Row) -> bool:
    """Pipelines over machines."""
    return row.work.axes.pp > 1 and row.cluster.nodes > 1


PIPELINE_PART, PRODUCTS_PART = 0.1, 0.4
"""Of the variance of the model's error what layouts of one network on one number of GPUs have in common if they have
as many stages, and if they have the same degree of tensor parallelism and the same micro-batch: pairs of the layouts
that alternatives.ERROR is from.  Half of these or half more give the same picks."""


def prospect(row: Row, software: Software, stalls: Stalls) -> Prospect:
    """What a layout may turn out to be; speeds in tokens per second."""
    work = row.work
    quiet, slow = predicted(row, calm(software)), predicted(row, stalling(software))
    return Prospect(
        speed=work.step_tokens / quiet,
        runs=runs(row, software),
        stalls=stalls.of(row, software),
        stalled_speed=work.step_tokens / slow,
        shared=(
            (("stages", work.axes.pp), PIPELINE_PART),
            (("products", work.axes.tp, work.micro_batch), PRODUCTS_PART),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What the picks of a cell reach, as fractions of its best."""

    name: tuple[str, int]
    first: float
    """The first pick."""
    three: float
    """The best of three."""
    five: float
    """The best of five."""
    crashed: int
    """Of the first five picks, those that crashed."""


def of_each_kind(rows: Sequence[Row], prospects: Sequence[Prospect], count: int) -> tuple[int, ...]:
    """Places as `tonnage plan` chooses alternatives: by expected speed, no two that use the same parallel dimensions.

    `tonnage.planner.alternatives.difference` counts nothing else in which the grid differs.  The rest comes last.
    """
    order = sorted(range(len(prospects)), key=lambda place: -prospects[place].expected)
    kinds: dict[tuple[bool, bool], int] = {}
    for place in order:
        axes = rows[place].work.axes
        kinds.setdefault((axes.tp > 1, axes.pp > 1), place)
    firsts = list(kinds.values())
    return tuple([*firsts, *(place for place in order if place not in firsts)][:count])


def cell(
    name: tuple[str, int],
    found: Sequence[Candidate],
    software: Software,
    stalls: Stalls,
    oracle: bool = False,
    kinds: bool = False,
) -> Cell:
    """Picks among those that fit; with `oracle`, among those that ran; with `kinds`, by `of_each_kind`."""
    best = max(one.speed for one in found)
    able = [one for one in found if (one.speed > 0 if oracle else fullness(one.row, software) <= MOST)]
    prospects = [prospect(one.row, software, stalls) for one in able]
    picks = of_each_kind([one.row for one in able], prospects, 5) if kinds else best_set(prospects, 5)
    reached = [able[place].speed / best for place in picks] or [0.0]
    return Cell(
        name=name,
        first=reached[0],
        three=max(reached[:3]),
        five=max(reached),
        crashed=sum(speed == 0 for speed in reached),
    )


def refused(rows: Sequence[Row], software: Software) -> float:
    """The fraction of those that ran which our memory refuses."""
    ran = [row for row in rows if row.ran]
    return sum(fullness(row, software) > MOST for row in ran) / len(ran)


def table(
    rows: Sequence[Row],
    calibrated: Callable[[str], Software],
    others: Sequence[Row] = (),
    oracle: bool = False,
    kinds: bool = False,
) -> list[Cell]:
    """Each cell of the rows with the software and the chances of stalls that were calibrated without its model, from
    these rows and others."""

    @cache
    def stalls(model: str) -> Stalls:
        return Stalls.seen([row for row in (*rows, *others) if row.model != model], calibrated(model))

    return [
        cell(name, found, calibrated(name[0]), stalls(name[0]), oracle, kinds)
        for name, found in candidates(rows).items()
    ]


def means(cells: Sequence[Cell]) -> tuple[float, float, float]:
    """Of the first pick, the best of three, the best of five."""
    return mean(c.first for c in cells), mean(c.three for c in cells), mean(c.five for c in cells)
