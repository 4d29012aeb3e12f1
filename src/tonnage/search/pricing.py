"""Seconds of candidates by the time model, without running anything."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from tonnage.costs.answer import price
from tonnage.costs.shape import Shape
from tonnage.costs.timing import Timing
from tonnage.costs.work import Work
from tonnage.device import Cluster
from tonnage.search.bounds import least_bytes
from tonnage.solution import Candidate


@dataclass(frozen=True, kw_only=True)
class Priced:
    """A candidate with its time, and the least memory that it needs."""

    candidate: Candidate
    """Job and plan."""
    timing: Timing
    """By the time model."""
    least_bytes: int
    """No run of it can do with less inside torch's allocator."""

    @property
    def tokens_at_once(self) -> float:
        """Of a micro-batch, on the part of the matrices and of the sequence that one rank has."""
        job, plan = self.candidate.job, self.candidate.plan
        return job.tokens_per_micro_batch / (plan.tp * plan.cp)

    @property
    def seconds_per_token(self) -> float:
        """Of one GPU: what candidates of equal batches are ordered by."""
        return 1.0 / self.timing.tokens_per_second_per_gpu


def least(candidate: Candidate, cluster: Cluster) -> int:
    """Bytes that no run of a candidate can do without.  Raises CannotEstimate for a network of an unknown kind."""
    work = Work.of(candidate.job, candidate.plan, cluster)
    shape = Shape.of(candidate.job.model.config)
    return least_bytes(shape, work, gradients_go=candidate.plan.optimizer_in_backward)


def priced(candidate: Candidate, cluster: Cluster) -> Priced:
    """The candidate's price.  Raises CannotEstimate where the time model knows nothing of the network or the card."""
    return Priced(
        candidate=candidate,
        timing=price(candidate.job, candidate.plan, cluster),
        least_bytes=least(candidate, cluster),
    )


def fastest_first(candidates: Iterable[Candidate], cluster: Cluster) -> list[Priced]:
    """All of them with their prices; of equally fast ones the simpler plan, then the smaller need, comes first."""
    found = [priced(candidate, cluster) for candidate in candidates]
    return sorted(found, key=lambda one: (one.seconds_per_token, _changes(one.candidate), one.least_bytes))


def _changes(candidate: Candidate) -> int:
    """How many options of a plan are not the default."""
    return sum(getattr(candidate.plan, item.name) != item.default for item in fields(candidate.plan))
