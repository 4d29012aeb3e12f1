"""Plans whose layers run again no more than they must: a budget of activations that fills what the card leaves free.

How many bytes a budget may have is known when the plan has been run: what else is held at the peak does not depend on
it, so a run that leaves bytes free says how many more may be kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from tonnage.case import Case
from tonnage.errors import CannotEstimate, UsageError
from tonnage.estimates.estimate import Estimate
from tonnage.estimates.step_time import price_of_run
from tonnage.planner.solution import Candidate
from tonnage.search.best import Search, fits
from tonnage.search.pricing import Priced, priced
from tonnage.trainers.cases import check
from tonnage.units import MIB

MOST: Final = 2
"""Plans that are filled up."""

RUNS: Final = 3
"""Of each, at most."""

NEAR: Final = 0.02
"""Part of what may be used that is not worth another run."""

_SPARED: Final = (0.01, 0.005)
"""Parts of what may be used that a first budget is to leave free, and each later one: the allocator keeps more in
reserve than it did under full checkpointing, 0.2 GiB of an RTX 4090's 24, and the same again to a few segments."""

_BACK: Final = 0.85
"""What is tried at most of a budget's growth when the card was full: by how much it was too large is not known."""

_LEAST_GROWN: Final = 0.75
"""Bytes of the process that each byte less of a budget is taken to free, if two runs say less."""

_PROMISING: Final = 0.97
"""Part of the fastest plan's time that a budget has to promise to be worth its runs."""

_FASTER: Final = 0.995
"""The same of a plan that is shown, when it has been run."""


def fill(search: Search, top: int) -> None:
    """Add to what a search found, at most `top` plans, those that checkpointing under a budget makes faster."""
    question = search.question
    if not search.found or search.found[0][0].timing is None:
        return
    if question.plan.checkpointing.startswith("budget"):
        search.found = sorted(map(partial(_as_run, search), search.found), key=lambda pair: pair[0].seconds_per_token)
    if not (question.is_open("checkpointing") and question.may_be("checkpointing", "budget")):
        return
    full = _worth(search)
    answers = search.ghosts.fit([one.candidate for one in full], question.cluster)
    tried = [
        _Filling(search, one, answer)
        for one, answer in zip(full, answers, strict=True)
        if isinstance(answer, Estimate) and fits(answer, question)
    ]
    _foresee(search, tried)
    for _ in range(RUNS):
        going = [one for one in tried if one.next_bytes is not None]
        asked = [one.candidate for one in going]
        for one, answer in zip(going, search.ghosts.fit(asked, question.cluster), strict=True):
            one.learn(answer if isinstance(answer, Estimate) else None)
    best = search.found[0][0].seconds_per_token
    search.found += [
        one.best for one in tried if one.best is not None and one.best[0].seconds_per_token < best * _FASTER
    ]
    search.found.sort(key=lambda pair: pair[0].seconds_per_token)
    del search.found[top:]


def _foresee(search: Search, tried: list[_Filling]) -> None:
    """Let idle workers run what will be looked at beside the plan that promises most, whatever its budget is."""
    going = [one.candidate for one in tried if one.next_bytes is not None]
    if going:
        beside = search.afterwards(going[0])
        asks = [(one, on) for one, on in beside if not one.plan.checkpointing.startswith("budget")]
        search.ghosts.ahead(asks, search.question.cluster)


def _as_run(search: Search, pair: tuple[Priced, Estimate]) -> tuple[Priced, Estimate]:
    """A plan under a budget that the user has given, with the seconds of what was run."""
    one, estimate = pair
    job, plan = one.candidate.job, one.candidate.plan
    return replace(one, timing=price_of_run(estimate, Case(job, plan, search.question.cluster))), estimate


def _worth(search: Search) -> list[Priced]:
    """Candidates with all layers checkpointed that may become the fastest plan, the most promising first.

    With a part x of the bytes that layers can keep, about (1 - x)^2 of their seconds run again: of four networks 0.43
    to 0.54 with a quarter, 0.17 to 0.33 with half (docs/explanation/checkpointing.md).
    """
    best = search.found[0][0].seconds_per_token
    promised: dict[tuple[float, float], tuple[float, Priced]] = {}
    for none, full in _pairs(search):
        least, most = search.expected.bytes(full), search.expected.bytes(none)
        room = search.question.budget_bytes - least
        part = min(room / (most - least), 1.0) if most > least else 1.0
        seconds = none.seconds_per_token + (1 - part) ** 2 * (full.seconds_per_token - none.seconds_per_token)
        if room > 0 and seconds < best * _PROMISING:  # of variants that take the same time, the simplest
            promised.setdefault((none.seconds_per_token, full.seconds_per_token), (seconds, full))
    return [full for _, full in sorted(promised.values(), key=lambda pair: pair[0])[:MOST]]


def _pairs(search: Search) -> Iterator[tuple[Priced, Priced]]:
    """Candidates without checkpointing and with all of it, of which one was run and the first does not fit."""
    known: list[Candidate] = []
    run = [*(one.candidate for one, _ in search.found), *(one.candidate for one in search.too_large)]
    for candidate in run:
        none, full = (_with(candidate, way) for way in ("none", "full"))
        if full in known or none in (one.candidate for one, _ in search.found):
            continue
        known.append(full)
        try:
            check(Case(full.job, replace(full.plan, checkpointing=_value(MIB)), search.question.cluster))
        except UsageError:
            continue
        yield priced(none, search.question.cluster), priced(full, search.question.cluster)


def _with(candidate: Candidate, checkpointing: str) -> Candidate:
    return replace(candidate, plan=replace(candidate.plan, checkpointing=checkpointing))


def _value(budget_bytes: int) -> str:
    return f"budget={budget_bytes // MIB}MiB"


@dataclass
class _Filling:
    """One plan on the way to the budget that fills the card."""

    search: Search
    full: Priced
    """With all layers checkpointed."""
    run: Estimate
    """Of that."""
    next_bytes: int | None = None
    """The budget that is to be tried; None: none is worth it any more."""
    held_bytes: int = 0
    """The largest budget that fits."""
    tried: tuple[int, int] = (0, 0)
    """The budget of the latest run that did not run out, and what its process needed."""
    best: tuple[Priced, Estimate] | None = None
    """The plan with the largest that fits."""

    def __post_init__(self) -> None:
        peak = self.run.peak
        phases = {phase.name: phase.allocated_bytes for phase in self.run.phases}
        between = max((phases.get(name, 0) for name in ("forward", "backward")), default=0)
        self.held_bytes = peak.by_category["activation"] if peak.allocated_bytes == between else 0
        self.tried = self.held_bytes, peak.process_bytes - peak.allocated_bytes + between
        if self.capacity_bytes - self.tried[1] > NEAR * self.capacity_bytes:
            self.next_bytes = self.held_bytes + self._room(self.tried[1], _SPARED[0])

    @property
    def capacity_bytes(self) -> int:
        """What a process may use."""
        return self.search.question.budget_bytes

    @property
    def candidate(self) -> Candidate:
        """With the budget to be tried."""
        assert self.next_bytes is not None
        return _with(self.full.candidate, _value(self.next_bytes))

    def learn(self, answer: Estimate | None) -> None:
        """Go on from a run: by what it left free, or by what it was too large."""
        assert self.next_bytes is not None
        budget_bytes, self.next_bytes = self.next_bytes, None
        if answer is None:
            return
        process_bytes = answer.peak.process_bytes
        if not answer.fits:  # it would have needed still more
            less = self.held_bytes + int(_BACK * (budget_bytes - self.held_bytes))
            self.next_bytes = min(less, budget_bytes + self._room(process_bytes, _SPARED[1]))
            return
        left = self.capacity_bytes - process_bytes
        if left >= 0:
            self._keep(budget_bytes, answer)
        if left < 0 or left > NEAR * self.capacity_bytes:
            grown = self._grown(budget_bytes, process_bytes)
            grown = max(grown, 1.0) if left > 0 else min(max(grown, _LEAST_GROWN), 1.0)
            self.next_bytes = budget_bytes + int(self._room(process_bytes, _SPARED[1]) / grown)
        self.tried = budget_bytes, process_bytes

    def _room(self, process_bytes: int, spared: float) -> int:
        """Bytes that a process may have more than these if a part of what may be used is to be left."""
        return int(self.capacity_bytes * (1 - spared)) - process_bytes

    def _grown(self, budget_bytes: int, process_bytes: int) -> float:
        """Bytes of the process for each further byte of the budget, by this run and the one before."""
        before_bytes, before_process = self.tried
        more = budget_bytes - before_bytes
        return (process_bytes - before_process) / more if more else 1.0

    def _keep(self, budget_bytes: int, answer: Estimate) -> None:
        candidate, cluster = _with(self.full.candidate, _value(budget_bytes)), self.search.question.cluster
        try:
            timing = price_of_run(answer, Case(candidate.job, candidate.plan, cluster))
        except CannotEstimate:
            return
        self.held_bytes, self.best = budget_bytes, (replace(self.full, candidate=candidate, timing=timing), answer)
