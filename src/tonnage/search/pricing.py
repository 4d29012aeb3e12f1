"""Seconds of candidates by the time model, without running anything."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import ne
from typing import Final

from tonnage.case import Case
from tonnage.catalog.overheads import overheads
from tonnage.cluster import Cluster
from tonnage.errors import CannotEstimate
from tonnage.estimates.step_time import price
from tonnage.mesh import Axes
from tonnage.planner.solution import Candidate
from tonnage.plans import Plan
from tonnage.search.bounds import least_bytes, least_host_bytes, under_way, usually_beyond
from tonnage.search.unpriced import ranked
from tonnage.search.waiting import waiting_at
from tonnage.timing.shape import Shape
from tonnage.timing.stacks import stacks
from tonnage.timing.timing import Timing
from tonnage.timing.work import Work

_DEFAULTS: Final = tuple(vars(Plan()).values())
"""Of a plan's options, in their order."""


@dataclass(frozen=True, kw_only=True)
class Priced:
    """A candidate with its time, and the least memory that it needs."""

    candidate: Candidate
    """Job and plan."""
    timing: Timing | None
    """By the time model; None where it knows nothing of the network or the card."""
    least_bytes: int
    """No run of it can do with less inside torch's allocator."""
    beyond_bytes: float
    """What the process of a run usually needs beyond that."""

    rough: bool
    """Whether there is more of the network than its words, whose least alone is known, or nothing of it is."""

    place: float = 0.0
    """Without a timing: its place in an order by what is known for certain (`unpriced`), from 1 to below 2, so
    that none is several times another."""

    @property
    def tokens_at_once(self) -> float:
        """Of a micro-batch, on the part of the matrices and of the sequence that one rank has."""
        job, plan = self.candidate.job, self.candidate.plan
        return job.tokens_per_micro_batch / (plan.tp * plan.cp)

    @property
    def seconds_per_token(self) -> float:
        """Of one GPU: what candidates of equal batches are ordered by; their places where no seconds are known."""
        return self.place if self.timing is None else 1.0 / self.timing.tokens_per_second_per_gpu


@dataclass(frozen=True, kw_only=True)
class Bounded:
    """A candidate with what is known of it before its time is."""

    candidate: Candidate
    """Job and plan."""
    work: Work
    """What a rank has to do."""
    shape: Shape | None
    """The network's dimensions; None for a network of an unknown kind."""
    least_bytes: int
    """No run of it can do with less inside torch's allocator; 0 where the shape is not known."""
    rough: bool
    """Whether the shape is that of a part of the network, or not known."""
    host_bytes: int = 0
    """No machine can do with less of its host's memory."""


def bounded(candidate: Candidate, cluster: Cluster) -> Bounded:
    """A candidate with the least memory of its fullest rank.

    A pipeline's first rank has one micro-batch more under way than its second, which gets more.
    """
    work, (shape, rough) = Work.of(candidate.job, candidate.plan, cluster), _shape_of(candidate)
    if shape is None:
        return Bounded(candidate=candidate, work=work, shape=None, least_bytes=0, rough=rough)
    more, steps = 0, candidate.job.grad_accum
    if work.axes.pp > 1:
        first, second = waiting_at(candidate, 0), waiting_at(candidate, 1)
        more = max(steps * first, int(steps * second - under_way(shape, work)))
    least = more + least_bytes(shape, work, gradients_go=candidate.plan.optimizer_in_backward)
    return Bounded(
        candidate=candidate,
        work=work,
        shape=shape,
        least_bytes=least,
        rough=rough,
        host_bytes=least_host_bytes(shape, work, candidate.plan) * cluster.gpus_per_node,
    )


def priced(candidate: Candidate, cluster: Cluster) -> Priced:
    """The candidate's price, as far as it is known."""
    return _priced(bounded(candidate, cluster), cluster)


def _priced(known: Bounded, cluster: Cluster) -> Priced:
    return Priced(
        candidate=known.candidate,
        timing=_timing(known.candidate, known.work, cluster),
        least_bytes=known.least_bytes,
        beyond_bytes=beyond_bytes(known, cluster),
        rough=known.rough,
    )


def beyond_bytes(known: Bounded, cluster: Cluster) -> float:
    """What the process of a run usually needs beyond the least."""
    if known.shape is None:  # what runs like it need is taken to grow as this does
        return float(known.candidate.job.tokens_per_micro_batch)
    return usually_beyond(known.shape, known.work) + _outside(known.work.axes, cluster)


def shape_of(candidate: Candidate) -> Shape | None:
    """The dimensions of the stack of equal layers that sees the job's tokens, as far as they are known."""
    return _shape_of(candidate)[0]


def _shape_of(candidate: Candidate) -> tuple[Shape | None, bool]:
    """That, and whether it is not all of the network: what sees images or sounds needs more, of which no least is
    known."""
    try:
        found = stacks(candidate.job)
    except CannotEstimate:
        return None, True
    last = found[-1]
    return (last.shape, len(found) > 1) if last.seq_len == candidate.job.seq_len else (None, True)


def _timing(candidate: Candidate, work: Work, cluster: Cluster) -> Timing | None:
    try:
        return price(Case(candidate.job, candidate.plan, cluster), work)
    except CannotEstimate:
        return None


@lru_cache(maxsize=1024)
def _outside(layout: Axes, cluster: Cluster) -> int:
    """Bytes outside torch's allocator: the context, and a communicator for each axis of several ranks."""
    sizes = (layout.pp, layout.dp_replicate, layout.shards, layout.cp, layout.tp)
    ranks = [size for size in sizes if size > 1]
    return overheads(cluster.device, ranks, gpus_per_node=cluster.gpus_per_node).bytes


def fastest_first(candidates: Iterable[Candidate], cluster: Cluster) -> list[Priced]:
    """`in_order` of candidates of which nothing is known yet."""
    return in_order((bounded(one, cluster) for one in candidates), cluster)


def in_order(candidates: Iterable[Bounded], cluster: Cluster) -> list[Priced]:
    """All of them with their prices, fastest first.

    Of equally fast ones the simpler plan, then the one with the smaller need, comes first.
    Where some have seconds the others are left out; where none has, they are ranked without.
    """
    every = [_priced(known, cluster) for known in candidates]
    found = [one for one in every if one.timing is not None]
    if not found:
        order = ranked(every)
        return [replace(one, place=1 + number / len(order)) for number, one in enumerate(order)]
    return sorted(found, key=lambda one: (one.seconds_per_token, _changes(one.candidate), one.least_bytes))


def _changes(candidate: Candidate) -> int:
    """How many options of a plan are not the default."""
    return sum(map(ne, vars(candidate.plan).values(), _DEFAULTS))
