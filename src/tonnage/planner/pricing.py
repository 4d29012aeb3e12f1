"""Price candidates by the time model and bound their memory, without running anything.

bounded = bound_candidate(candidate, cluster)        # memory alone, cheap
order = price_in_order(some_bounded, cluster)        # seconds too, fastest first
"""

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
from tonnage.mesh import Mesh
from tonnage.planner.bounds import bound_activations, bound_host_memory, bound_memory, estimate_extra
from tonnage.planner.pipeline_buffers import buffer_bytes_at
from tonnage.planner.solution import Candidate
from tonnage.planner.unpriced import rank_unpriced
from tonnage.plans import Plan
from tonnage.timing.shape import Shape
from tonnage.timing.stacks import read_stacks
from tonnage.timing.timing import Timing
from tonnage.timing.work import Work

_DEFAULTS: Final = tuple(vars(Plan()).values())
"""The default values of a plan's options, in their order."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Priced:
    """A candidate with its time and the bounds of its memory; equal to itself alone."""

    candidate: Candidate
    """Job and plan."""
    timing: Timing | None
    """By the time model; None if it does not know the network or the card."""
    bound_bytes: int
    """Lower bound: no run needs less inside torch's allocator."""
    extra_bytes: float
    """Bytes that the process of a run usually needs above the bound."""

    is_rough: bool
    """True if the bound covers only a part of the network, or nothing of it."""

    rank: float = 0.0
    """Without a timing: the place in an order that needs no seconds (`unpriced`), from 1 to below 2.

    No candidate is then several times slower than another."""

    @property
    def tokens_at_once(self) -> float:
        """Return the tokens of a micro-batch, divided by tensor and context parallelism."""
        job, plan = self.candidate.job, self.candidate.plan
        return job.tokens_per_micro_batch / (plan.tp * plan.cp)

    @property
    def seconds_per_token(self) -> float:
        """Return the seconds a token on one GPU, by which candidates of equal batches are ordered; else the rank."""
        return self.rank if self.timing is None else 1.0 / self.timing.tokens_per_second_per_gpu


@dataclass(frozen=True, kw_only=True)
class Bounded:
    """A candidate with the bounds of its memory, before it is priced."""

    candidate: Candidate
    """Job and plan."""
    work: Work
    """The work of one rank."""
    shape: Shape | None
    """The network's dimensions; None for an unknown kind of network."""
    bound_bytes: int
    """Lower bound inside torch's allocator; 0 if the shape is not known."""
    is_rough: bool
    """True if the shape covers only a part of the network, or is not known."""
    host_bytes: int = 0
    """Lower bound of a machine's host memory."""


def bound_candidate(candidate: Candidate, cluster: Cluster) -> Bounded:
    """Return the candidate with the memory bound of its fullest rank.

    In a pipeline that is the first, with one more micro-batch in flight, or the second, whose buffers are larger.
    """
    work, (shape, is_rough) = Work.of(candidate.job, candidate.plan, cluster), _find_shape(candidate)
    if shape is None:
        return Bounded(candidate=candidate, work=work, shape=None, bound_bytes=0, is_rough=is_rough)
    buffers, micro_batches = 0, candidate.job.grad_accum
    if work.axes.pp > 1:
        first, second = buffer_bytes_at(candidate, 0), buffer_bytes_at(candidate, 1)
        buffers = max(micro_batches * first, int(micro_batches * second - bound_activations(shape, work)))
    inside = bound_memory(shape, work, frees_gradients=candidate.plan.optimizer_in_backward)
    return Bounded(
        candidate=candidate,
        work=work,
        shape=shape,
        bound_bytes=buffers + inside,
        is_rough=is_rough,
        host_bytes=bound_host_memory(shape, work, candidate.plan) * cluster.gpus_per_node,
    )


def price_candidate(candidate: Candidate, cluster: Cluster) -> Priced:
    """Return the candidate with its price, as far as it is known."""
    return _price_bounded(bound_candidate(candidate, cluster), cluster)


def _price_bounded(bounded: Bounded, cluster: Cluster) -> Priced:
    return Priced(
        candidate=bounded.candidate,
        timing=_find_timing(bounded.candidate, bounded.work, cluster),
        bound_bytes=bounded.bound_bytes,
        extra_bytes=usual_extra_bytes(bounded, cluster),
        is_rough=bounded.is_rough,
    )


def usual_extra_bytes(bounded: Bounded, cluster: Cluster) -> float:
    """Return what the process of a run usually needs above the bound.

    For an unknown network it is the micro-batch's tokens: only its ratio between candidates matters then.
    """
    if bounded.shape is None:
        return float(bounded.candidate.job.tokens_per_micro_batch)
    return estimate_extra(bounded.shape, bounded.work) + _outside_bytes(bounded.work.axes, cluster)


def find_shape(candidate: Candidate) -> Shape | None:
    """Return the dimensions of the stack of equal layers that processes the job's tokens, if they are known."""
    return _find_shape(candidate)[0]


def _find_shape(candidate: Candidate) -> tuple[Shape | None, bool]:
    """Return the shape, and whether the network has more than it.

    The part that processes images or sounds needs memory too, and has no known bound.
    """
    try:
        found = read_stacks(candidate.job)
    except CannotEstimate:
        return None, True
    last = found[-1]
    return (last.shape, len(found) > 1) if last.seq_len == candidate.job.seq_len else (None, True)


def _find_timing(candidate: Candidate, work: Work, cluster: Cluster) -> Timing | None:
    try:
        return price(Case(candidate.job, candidate.plan, cluster), work)
    except CannotEstimate:
        return None


@lru_cache(maxsize=1024)
def _outside_bytes(layout: Mesh, cluster: Cluster) -> int:
    """Return the bytes outside torch's allocator: the context, and a communicator for each axis of several ranks."""
    sizes = (layout.pp, layout.dp_replicate, layout.shards, layout.cp, layout.tp)
    ranks = [size for size in sizes if size > 1]
    return overheads(cluster.device, ranks, gpus_per_node=cluster.gpus_per_node).bytes


def price_all(candidates: Iterable[Candidate], cluster: Cluster) -> list[Priced]:
    """Return `price_in_order` of candidates that are not bounded yet."""
    return price_in_order((bound_candidate(candidate, cluster) for candidate in candidates), cluster)


def price_in_order(candidates: Iterable[Bounded], cluster: Cluster) -> list[Priced]:
    """Return the candidates with their prices, fastest first.

    Among equally fast ones the simpler plan comes first, then the one with the smaller bound.  If some have seconds
    the others are left out; if none has, they are ranked without.
    """
    every = [_price_bounded(bounded, cluster) for bounded in candidates]
    timed = [priced for priced in every if priced.timing is not None]
    if not timed:
        order = rank_unpriced(every)
        return [replace(priced, rank=1 + number / len(order)) for number, priced in enumerate(order)]
    return sorted(timed, key=lambda priced: (priced.seconds_per_token, _count_changes(priced), priced.bound_bytes))


def _count_changes(priced: Priced) -> int:
    """Return how many options of the plan are not the default."""
    return sum(map(ne, vars(priced.candidate.plan).values(), _DEFAULTS))
