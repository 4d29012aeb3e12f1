"""The search: candidates in the order of their predicted time, until enough of them fit on the ghost.

A candidate is run only if nothing speaks against it: the least memory that it needs is within the card, its
techniques take the job, and no candidate that needs less has failed already.  What is shown has been run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final

from tonnage.axes import SHARDING
from tonnage.costs.answer import as_time
from tonnage.errors import UsageError
from tonnage.estimates import Estimate
from tonnage.predict import check
from tonnage.search import space
from tonnage.search.depth import Need
from tonnage.search.expectation import Expectation
from tonnage.search.memory import Ghosts
from tonnage.search.pricing import Priced, fastest_first
from tonnage.search.space import AXES, OFFLOADS, ORDER, Question
from tonnage.search.words import describe
from tonnage.solution import Candidate, Choice, Refused
from tonnage.units import gib

MOST_RUNS: Final = 60
"""Candidates that are run before the search is content with what it has."""

WORTH: Final = 3.0
"""An alternative may take so many times as long as the best plan."""

LIKELY: Final = 1.02
"""Candidates that are expected to need up to so many times the card are run in the order of their time."""

DOUBTFUL: Final = 1.25
"""Those up to here are run at the end, if they would beat what was found."""

MOST_DOUBTFUL: Final = 8
"""How many of those."""

_SAID: Final = 8
"""Refused plans that are named."""


@dataclass
class Search:
    """One search over one question; what it learns on the way stays with it."""

    question: Question
    """What is asked."""
    ghosts: Ghosts
    """Who runs candidates."""
    say: Callable[[str], None]
    """Progress."""
    found: list[tuple[Priced, Estimate]] = field(default_factory=list)
    """Plans that fit, fastest first, no two of the same kind."""
    too_large: list[Priced] = field(default_factory=list)
    """Those that were run and do not."""
    refused: dict[str, Refused] = field(default_factory=dict)
    """Techniques that do not take the job, and faster plans that do not fit."""
    expected: Expectation = field(default_factory=Expectation)
    """What runs so far say of those to come."""
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("priced", "below_bound", "ruled_out"), 0))
    """How many candidates met which end without a run."""

    def run(self, top: int) -> None:
        """Find `top` plans of different kinds; with the host's memory only where there is none without."""
        for offload in (False, True):
            order = fastest_first(space.candidates(self.question, offload=offload), self.question.cluster)
            self.counts["priced"] += len(order)
            self.say(f"{len(order):,} combinations{' with offload' if offload else ''} priced; running the fastest")
            self._verify(order, top)
            self._verify_doubtful(order)
            if self.found:
                del self.found[top:]
                return

    def _verify(self, order: list[Priced], top: int) -> None:
        """Run those that are likely to fit, fastest first, until `top` kinds of them do."""
        likely = (one for one in self._hopeful(order) if self._expected_part(one) <= LIKELY)
        runs = 0
        while len(self.found) < top and runs < MOST_RUNS:
            batch = list(islice(likely, self.ghosts.count))
            if not batch:
                return
            runs += len(batch)
            self._run(batch)

    def _verify_doubtful(self, order: list[Priced]) -> None:
        """Run some that are not likely to fit, but would beat what was found: those nearest to the card first."""
        done: set[int] = set()
        for _ in range(0, MOST_DOUBTFUL, self.ghosts.count):
            best = self.found[0][0].seconds_per_token if self.found else float("inf")
            faster = [one for one in order if one.seconds_per_token < best and id(one) not in done]
            doubtful = [one for one in faster if LIKELY < self._expected_part(one) <= DOUBTFUL]
            batch = list(islice(self._hopeful(sorted(doubtful, key=self._expected_part)), self.ghosts.count))
            if not batch:
                return
            done |= {id(one) for one in batch}
            self._run(batch)

    def _expected_part(self, one: Priced) -> float:
        """Of what the card lets a process use."""
        return self.expected.bytes(one) / self._capacity

    def _run(self, batch: list[Priced]) -> None:
        """Look what they need, and run those whole that seem to fit."""
        seem = []
        for one, need in zip(
            batch, self.ghosts.need([o.candidate for o in batch], self.question.cluster), strict=True
        ):
            if not isinstance(need, Need):
                self._refuse(describe(one.candidate), str(need))
                continue
            self.expected.learn(one, need.least_bytes)
            if need.least_bytes > self._capacity:
                self._does_not_fit(one, gib(need.process_bytes))
            else:
                seem.append(one)
        for one, answer in zip(
            seem, self.ghosts.fit([o.candidate for o in seem], self.question.cluster), strict=True
        ):
            if not isinstance(answer, Estimate):
                self._refuse(describe(one.candidate), str(answer))
            elif fits(answer, self.question):
                self.found.append((one, answer))
                self.say(f"fits: {describe(one.candidate)}")
            else:
                peak = answer.peak.process_bytes
                self._does_not_fit(one, gib(peak) if answer.fits else f"more than {gib(self._capacity)}")
        self.found.sort(key=lambda pair: pair[0].seconds_per_token)
        fastest_of_kind = {kind(pair[0]): pair for pair in reversed(self.found)}
        self.found = [pair for pair in self.found if pair is fastest_of_kind[kind(pair[0])]]

    def _does_not_fit(self, one: Priced, need: str) -> None:
        self.too_large.append(one)
        self._refuse(describe(one.candidate), f"does not fit: {need}", faster=True)

    def _hopeful(self, order: list[Priced]) -> Iterator[Priced]:
        """Those that are worth a run, as things stand when the next is asked for."""
        for one in order:
            if self.found and one.seconds_per_token > WORTH * self.found[0][0].seconds_per_token:
                return
            if any(kind(one) == kind(other) and not _faster(one, other) for other, _ in self.found):
                continue
            if one.least_bytes > self._capacity:
                self.counts["below_bound"] += 1
                continue
            if any(_needs_no_less(one.candidate, other.candidate) for other in self.too_large):
                self.counts["ruled_out"] += 1
                continue
            try:
                check(one.candidate.job, one.candidate.plan, self.question.cluster)
            except UsageError as error:
                self._refuse(str(error).partition(":")[0], str(error).partition(": ")[2])
                continue
            yield one

    @property
    def _capacity(self) -> int:
        return self.question.budget_bytes

    def _refuse(self, what: str, why: str, *, faster: bool = False) -> None:
        if what not in self.refused and (not faster or len(self.refused) < _SAID):
            self.refused[what] = Refused(what=what, why=why)

    def choices(self) -> tuple[Choice, ...]:
        """What was found, with names, without reasons yet."""
        return tuple(
            Choice(
                name="best" if not place else describe(one.candidate),
                candidate=one.candidate,
                estimate=replace(estimate, time=as_time(one.timing)),  # of all its micro-batches
            )
            for place, (one, estimate) in enumerate(self.found)
        )


def fits(estimate: Estimate, question: Question) -> bool:
    """Within the card and its headroom."""
    return estimate.fits and estimate.peak.process_bytes <= question.budget_bytes


def kind(one: Priced) -> tuple[Any, ...]:
    """What makes two plans alternatives to each other, not variations: everything but micro-batch and fine print."""
    job, plan = one.candidate.job, one.candidate.plan
    return (
        job.method,
        *(getattr(plan, name) > 1 for name in AXES),
        plan.shard in SHARDING,
        plan.checkpointing,
        plan.precision,
        plan.optimizer,
        *(getattr(plan, name) for name in OFFLOADS),
    )


def _faster(one: Priced, other: Priced) -> bool:
    return one.seconds_per_token < other.seconds_per_token


def _needs_no_less(candidate: Candidate, failed: Candidate) -> bool:
    """Whether a candidate differs from one that failed only towards more memory."""
    job, other = candidate.job, failed.job
    if job.method != other.method or job.micro_batch < other.micro_batch:
        return False
    for name, values in ORDER.items():
        mine, theirs = getattr(candidate.plan, name), getattr(failed.plan, name)
        if mine != theirs and (
            mine not in values or theirs not in values or values.index(mine) > values.index(theirs)
        ):
            return False
    if "hsdp" in (candidate.plan.shard, failed.plan.shard) and candidate.plan.shard != failed.plan.shard:
        return False  # it divides among fewer ranks than zero2 does
    same = {name: getattr(failed.plan, name) for name in ORDER}
    return replace(candidate.plan, **same) == failed.plan
