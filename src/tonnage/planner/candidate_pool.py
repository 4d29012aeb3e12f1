"""The candidates of a search: which are worth a trial run, as far as bounds and earlier runs say.

A candidate is run only if its memory bound is within the card, runs so far let it hope, its techniques accept the
job, and no candidate that needs at most as much has failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf
from typing import Final

from tonnage.errors import UsageError
from tonnage.planner.expectation import Expectation
from tonnage.planner.fit import explain_host_limit, fits_host
from tonnage.planner.pricing import Priced, bound_candidate, price_in_order
from tonnage.planner.question import Question
from tonnage.planner.refusals import Refusals
from tonnage.planner.solution import Candidate

LIKELY: Final = 1.02
"""Candidates expected to need up to this part of the card are run in the order of their time."""

SMALL: Final = 100
"""The number of combinations up to which the fastest of all that fit is found.

Among more, a candidate that is not expected to fit is run only if it would be faster by more than `_HARDLY`."""

_HARDLY: Final = 0.005
"""A part of a step's time far below the time model's error, which is 5.5 % in the median (docs/reference/time.md)."""


@dataclass
class CandidatePool:
    """The candidates of one question, and what is known of them."""

    question: Question
    refusals: Refusals
    counts: dict[str, int]
    """How many candidates were priced, above the card by their bound, or ruled out by others."""
    order: list[Priced] = field(default_factory=list)
    """The candidates being searched, fastest first."""
    tried: set[Priced] = field(default_factory=set)
    """Those that were probed or run."""
    deferred: set[Priced] = field(default_factory=set)
    """Those that were probed and may fit, but would not be the fastest."""
    impossible: set[Priced] = field(default_factory=set)
    """Those that are refused without a run."""
    expectation: Expectation = field(default_factory=Expectation)
    """Expected needs of the other candidates, from the runs so far."""

    @property
    def capacity_bytes(self) -> int:
        """Return the bytes of the card that a process may use."""
        return self.question.budget_bytes

    @property
    def worthwhile_factor(self) -> float:
        """Return the part of the fastest plan's time below which a candidate that may not fit is worth its runs."""
        return 1 - _HARDLY if len(self.order) > SMALL else 1.0

    def price(self, candidates: Sequence[Candidate]) -> list[Priced]:
        """Return the candidates that may fit by their bounds, priced, fastest first."""
        bounded = [bound_candidate(candidate, self.question.cluster) for candidate in candidates]
        fitting = [one for one in bounded if one.bound_bytes <= self.capacity_bytes]
        possible = [one for one in fitting if fits_host(one.host_bytes, self.question)]
        if len(possible) < len(fitting):
            least = min(one.host_bytes for one in fitting if not fits_host(one.host_bytes, self.question))
            self.refusals.add("offload to the host", explain_host_limit(least, self.question, at_least=True))
        self.counts["below_bound"] += len(candidates) - len(possible)
        self.counts["priced"] += len(possible)
        return price_in_order(possible, self.question.cluster)

    def expected_part(self, priced: Priced) -> float:
        """Return the part of the usable card that a candidate is expected to need."""
        return self.expectation.bytes(priced) / self.capacity_bytes

    def is_certain(self, priced: Priced) -> bool:
        """Return whether earlier runs say enough to run a candidate whole without a probe."""
        return self.expected_part(priced) * (1 + self.expectation.error(priced)) <= 1

    def is_worthwhile(self, priced: Priced, rivals: Iterable[Priced]) -> bool:
        """Return whether a candidate would be faster than all rivals by enough to be worth its runs."""
        factor = self.worthwhile_factor
        return all(priced.seconds_per_token < factor * rival.seconds_per_token for rival in rivals)

    def list_doubtful(self, found: Sequence[Priced]) -> list[Priced]:
        """Return the candidates that are unlikely to fit but may, and would beat all plans found.

        The nearest to the card comes first.
        """
        best = self.worthwhile_factor * min((priced.seconds_per_token for priced in found), default=inf)
        faster = takewhile(lambda priced: priced.seconds_per_token < best, self.order)
        new = (priced for priced in faster if priced not in self.tried)
        doubtful = [
            priced for priced in new if LIKELY < self.expected_part(priced) <= 1 + self.expectation.error(priced)
        ]
        return sorted(doubtful, key=self.expected_part)

    def is_possible(self, priced: Priced) -> bool:
        """Return whether only a run could say that a candidate does not fit or cannot be run."""
        method = priced.candidate.job.method
        if priced in self.impossible:
            return False
        if self.refusals.has_given_up(method) and not self.expectation.has_run(method):
            return False
        obstacle = self.refusals.find_obstacle(priced.candidate, self.question.cluster)
        if obstacle is None:
            return True
        if isinstance(obstacle, UsageError):
            what, _, why = str(obstacle).partition(": ")
            self.refusals.add(what, why)
        else:
            self.counts["ruled_out"] += 1
        self.impossible.add(priced)
        return False

    def reconsider_deferred(self) -> None:
        """Let deferred candidates be tried again: those before them may not fit."""
        self.tried -= self.deferred
        self.deferred.clear()
