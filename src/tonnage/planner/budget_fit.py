"""Find the activation budget that fills the card: layers then recompute no more than they must.

A plan without checkpointing may not fit where one with it leaves much free.  What else is held at the peak does not
depend on the budget, so a run that leaves bytes free says how many more may be kept.  No exported trainer can run
such a plan, so the search proposes one only with `--allow budget`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from tonnage.case import Case
from tonnage.errors import CannotEstimate
from tonnage.estimates.estimate import Estimate
from tonnage.estimates.step_time import price_of_run
from tonnage.planner.candidates import find_refusal
from tonnage.planner.fit import Fitting, fits, sort_by_time
from tonnage.planner.pricing import Priced, price_candidate
from tonnage.planner.question import Question
from tonnage.planner.search import Search
from tonnage.planner.solution import Candidate
from tonnage.units import MIB

MOST_PLANS: Final = 2
"""Plans that get a budget."""

MOST_RUNS: Final = 3
"""Runs for each of them."""

NEAR: Final = 0.02
"""The part of the usable card that is not worth another run."""

_SPARED: Final = (0.01, 0.005)
"""Parts of the usable card that the first budget and each later one leave free.

The allocator keeps more in reserve than under full checkpointing: 0.2 GiB of an RTX 4090's 24, the same to a few
segments with each budget."""

_BACK: Final = 0.85
"""The part of a budget's growth that is tried after the card was full: by how much it was too large is not known."""

_LEAST_GROWTH: Final = 0.75
"""Bytes of the process that each byte less of a budget is assumed to free, if two runs say less."""

_PROMISING: Final = 0.97
"""The part of the fastest plan's time that a budget has to promise to be worth its runs."""

_FASTER: Final = 0.995
"""The part of the fastest plan's time that a budget may take to be shown, after it was run."""


def add_budgets(search: Search, top: int) -> None:
    """Add the plans that a budget makes faster to those that a search found, keeping `top` of them."""
    question = search.question
    if not search.found or search.found[0].priced.timing is None:
        return
    if question.plan.checkpointing.startswith("budget"):
        search.found = sort_by_time([_price_by_run(fitting, question) for fitting in search.found])
    if not question.has_budgets():
        return
    full = _list_promising(search)
    answers = search.runner.run_whole([priced.candidate for priced in full], question.cluster)
    fitted = [
        _BudgetFit(question, priced, answer)
        for priced, answer in zip(full, answers, strict=True)
        if isinstance(answer, Estimate) and fits(answer, question)
    ]
    for _ in range(MOST_RUNS):
        unfinished = [fit for fit in fitted if fit.next_bytes is not None]
        answers = search.runner.run_whole([fit.candidate for fit in unfinished], question.cluster)
        for fit, answer in zip(unfinished, answers, strict=True):
            fit.learn(answer if isinstance(answer, Estimate) else None)
    limit = _FASTER * search.found[0].priced.seconds_per_token
    best = [fit.best for fit in fitted if fit.best is not None]
    faster = [fitting for fitting in best if fitting.priced.seconds_per_token < limit]
    search.found = sort_by_time([*search.found, *faster])[:top]


def _price_by_run(fitting: Fitting, question: Question) -> Fitting:
    """Return a plan under the user's own budget, with the seconds that its run shows."""
    job, plan = fitting.priced.candidate.job, fitting.priced.candidate.plan
    timing = price_of_run(fitting.estimate, Case(job, plan, question.cluster))
    return fitting._replace(priced=replace(fitting.priced, timing=timing))


def _list_promising(search: Search) -> list[Priced]:
    """Return candidates with full checkpointing that a budget may make the fastest plan, the most promising first.

    With a part x of the bytes that layers can keep, about (1 - x)^2 of their seconds are recomputed: of four networks
    0.43 to 0.54 with a quarter, 0.17 to 0.33 with half (docs/explanation/checkpointing.md).
    """
    best = search.found[0].priced.seconds_per_token
    promised: dict[tuple[float, float], tuple[float, Priced]] = {}
    for none, full in _list_pairs(search):
        least, most = search.pool.expectation.bytes(full), search.pool.expectation.bytes(none)
        room = search.question.budget_bytes - least
        part = min(room / (most - least), 1.0) if most > least else 1.0
        seconds = none.seconds_per_token + (1 - part) ** 2 * (full.seconds_per_token - none.seconds_per_token)
        if room > 0 and seconds < best * _PROMISING:  # of variants that take equally long, the first is the simplest
            promised.setdefault((none.seconds_per_token, full.seconds_per_token), (seconds, full))
    ordered = sorted(promised.values(), key=lambda pair: pair[0])
    return [full for _, full in ordered[:MOST_PLANS]]


def _list_pairs(search: Search) -> Iterator[tuple[Priced, Priced]]:
    """Yield candidates without and with full checkpointing, of which one was run and the first does not fit."""
    found = [priced.candidate for priced, _ in search.found]
    known: list[Candidate] = []
    for candidate in (*found, *(priced.candidate for priced in search.refusals.too_large)):
        none, full = (_with_checkpointing(candidate, value) for value in ("none", "full"))
        if full in known or none in found:
            continue
        known.append(full)
        if find_refusal(_with_checkpointing(full, _spell_budget(MIB)), search.question.cluster) is not None:
            continue
        yield price_candidate(none, search.question.cluster), price_candidate(full, search.question.cluster)


def _with_checkpointing(candidate: Candidate, checkpointing: str) -> Candidate:
    return replace(candidate, plan=replace(candidate.plan, checkpointing=checkpointing))


def _spell_budget(budget_bytes: int) -> str:
    return f"budget={budget_bytes // MIB}MiB"


@dataclass
class _BudgetFit:
    """One plan on the way to the budget that fills the card."""

    question: Question
    full: Priced
    """With full checkpointing."""
    run: Estimate
    """The estimate of that candidate."""
    next_bytes: int | None = None
    """The next budget to try; None: no further run is worth it."""
    held_bytes: int = 0
    """The largest budget that fits."""
    tried: tuple[int, int] = (0, 0)
    """The budget of the latest run that stayed within the card, and what its process needed."""
    best: Fitting | None = None
    """The plan with the largest budget that fits."""

    def __post_init__(self) -> None:
        peak = self.run.peak
        phases = {phase.name: phase.allocated_bytes for phase in self.run.phases}
        layers_bytes = max((phases.get(name, 0) for name in ("forward", "backward")), default=0)
        self.held_bytes = peak.by_category["activation"] if peak.allocated_bytes == layers_bytes else 0
        self.tried = self.held_bytes, peak.process_bytes - peak.allocated_bytes + layers_bytes
        if self.capacity_bytes - self.tried[1] > NEAR * self.capacity_bytes:
            self.next_bytes = self.held_bytes + self._room(self.tried[1], _SPARED[0])

    @property
    def capacity_bytes(self) -> int:
        """Return the bytes of the card that a process may use."""
        return self.question.budget_bytes

    @property
    def candidate(self) -> Candidate:
        """Return the candidate with the next budget."""
        assert self.next_bytes is not None
        return _with_checkpointing(self.full.candidate, _spell_budget(self.next_bytes))

    def learn(self, answer: Estimate | None) -> None:
        """Set the next budget by what a run left free, or by how much it was too large."""
        assert self.next_bytes is not None
        budget_bytes, self.next_bytes = self.next_bytes, None
        if answer is None:
            return
        process_bytes = answer.peak.process_bytes
        if not answer.fits_card:  # it would have needed still more
            smaller = self.held_bytes + int(_BACK * (budget_bytes - self.held_bytes))
            self.next_bytes = min(smaller, budget_bytes + self._room(process_bytes, _SPARED[1]))
            return
        left = self.capacity_bytes - process_bytes
        if left >= 0:
            self._keep(budget_bytes, answer)
        if left < 0 or left > NEAR * self.capacity_bytes:
            growth = self._measure_growth(budget_bytes, process_bytes)
            growth = max(growth, 1.0) if left > 0 else min(max(growth, _LEAST_GROWTH), 1.0)
            self.next_bytes = budget_bytes + int(self._room(process_bytes, _SPARED[1]) / growth)
        self.tried = budget_bytes, process_bytes

    def _room(self, process_bytes: int, spared: float) -> int:
        """Return the bytes by which a process may grow if this part of the usable card is to stay free."""
        return int(self.capacity_bytes * (1 - spared)) - process_bytes

    def _measure_growth(self, budget_bytes: int, process_bytes: int) -> float:
        """Return the bytes of the process for each further byte of the budget, by this run and the one before."""
        before_bytes, before_process = self.tried
        more = budget_bytes - before_bytes
        return (process_bytes - before_process) / more if more else 1.0

    def _keep(self, budget_bytes: int, answer: Estimate) -> None:
        candidate = _with_checkpointing(self.full.candidate, _spell_budget(budget_bytes))
        try:
            timing = price_of_run(answer, Case(candidate.job, candidate.plan, self.question.cluster))
        except CannotEstimate:
            return
        self.held_bytes = budget_bytes
        self.best = Fitting(replace(self.full, candidate=candidate, timing=timing), answer)
