"""Search the fastest plans that fit: candidates in the order of their predicted time, run on ghosts.

What bounds and earlier runs cannot rule out is probed (one step of a few layers).  What seems to fit then is run
whole, as many plans as are wanted side by side.  Only plans that were run whole are shown.

    search = Search(question, runner, progress)
    search.run(top=4)
    search.found[0]         # the fastest plan that fits
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from tonnage.estimates.estimate import Estimate
from tonnage.planner.alternatives import is_alike
from tonnage.planner.candidate_pool import LIKELY, CandidatePool
from tonnage.planner.candidates import list_candidates
from tonnage.planner.describe import describe
from tonnage.planner.fit import Fitting, explain_host_limit, fits, fits_card, host_bytes, sort_by_time
from tonnage.planner.pricing import Priced, bound_candidate, price_in_order
from tonnage.planner.probe import Need
from tonnage.planner.question import Question
from tonnage.planner.refusals import Refusals
from tonnage.planner.rough import decide_rough
from tonnage.planner.solution import Candidate
from tonnage.planner.trial_runner import MOST_SECONDS, TrialRunner
from tonnage.shallow.depths import choose_probe_depths
from tonnage.units import format_gib, pluralise

MOST_RUNS: Final = 60
"""Candidates that are run before the search stops with what it has."""

WORTH: Final = 3.0
"""An alternative may take up to this many times the best plan's time."""

EDGE: Final = 0.97
"""A candidate whose probe needs more than this part of the card is run whole only if it would be the fastest.

What the allocator keeps in reserve may be more than the rest."""

MOST_DOUBTFUL: Final = 8
"""How many candidates that are unlikely to fit are probed in the end, if they would beat the plans found."""

ROOM: Final = 0.15
"""The part of the usable card that one of the plans leaves free, if there are at least `WITH_ROOM` of them."""

WITH_ROOM: Final = 3
"""The number of requested plans from which on one of them leaves room."""

_MOST_ROOMY: Final = 2
"""Candidates that are tried for that plan."""


@dataclass
class Search:
    """One search over one question; what it learns stays with it."""

    question: Question
    runner: TrialRunner
    progress: Callable[[str], None]
    most_runs: int = MOST_RUNS
    """Candidates that are probed at most."""
    found: list[Fitting] = field(default_factory=list)
    """Plans that fit, fastest first, no two of them alike."""
    pending: list[Priced] = field(default_factory=list)
    """Candidates whose probes seem to fit, to be run whole."""
    near: list[Priced] = field(default_factory=list)
    """Candidates that seem to fit the card, but not the card less its headroom."""
    refusals: Refusals = field(default_factory=Refusals)
    """Candidates that do not fit or cannot be run, with the reasons."""
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("priced", "below_bound", "ruled_out"), 0))
    """How many candidates were decided without a run, and how."""
    pool: CandidatePool = field(init=False)
    """The candidates."""

    def __post_init__(self) -> None:
        self.pool = CandidatePool(self.question, self.refusals, self.counts)

    def run(self, top: int, *, doubtful: bool = True) -> None:
        """Find `top` plans that differ; those that use the host's memory only if there is none without.

        `doubtful`: also probe faster candidates that are unlikely to fit, but may.
        """
        self._search_places(top, doubtful)
        if not self.found and "attention" in self.refusals.broken and self.narrowed != self.question:
            self._restart(self.narrowed)  # every plan had the attention that does not work
            self._search_places(top, doubtful)

    @property
    def narrowed(self) -> Question:
        """Return the question without the options that never work."""
        return self.refusals.narrow(self.question)

    def _restart(self, question: Question) -> None:
        """Start over with another question: its candidates need other amounts of memory."""
        self.question, self.pending = question, []
        self.refusals.forget_candidates()
        self.pool = CandidatePool(question, self.refusals, self.counts)

    def _search_places(self, top: int, doubtful: bool) -> None:
        """Search where plans may keep data, one place after the other, until there are plans that fit."""
        for place in self.question.places:
            if self.refusals.only_failures:
                return  # none lacked memory, which is all that another place would give
            candidates = list(list_candidates(self.question, **place))
            if candidates:
                self.runner.warm_up()
            order = self.pool.order = self.pool.price(candidates)
            where = " with files" if place.get("files") else " with offload" if place["offload"] else ""
            if order:
                self.progress(f"{pluralise(len(order), 'combination')}{where} priced; running the fastest")
            count = max(top - 1, 1) if top >= WITH_ROOM else top
            decide_rough(self, order)
            self._search_likely(order, count)
            if doubtful:
                self._search_doubtful()
            if self.found:
                del self.found[count:]
                if count < top and not self._add_roomy(order):
                    self._search_likely(order, top)
                return

    def try_smallest(self, smallest: Sequence[Candidate]) -> None:
        """Run the candidates that need least, whatever was expected of them, before concluding that nothing fits."""
        tried = [priced.candidate for priced in self.refusals.too_large]
        new = [bound_candidate(one, self.question.cluster) for one in smallest if one not in tried]
        for priced in price_in_order(new, self.question.cluster):
            self._probe([priced])
            self._run_pending()
            if self.found:
                return

    def _may_go_on(self) -> bool:
        """Return whether further candidates may be run; if not, the answer says so."""
        tried = len(self.pool.tried)
        if tried < self.most_runs and not self.runner.is_late:
            return True
        limit = f"{MOST_SECONDS} s" if self.runner.is_late else pluralise(tried, "candidate")
        left = len(self.pool.order) - tried
        self.refusals.add("the search", f"ended after {limit}; {pluralise(left, 'combination')} were not run")
        return False

    def _search_likely(self, order: list[Priced], count: int) -> None:
        """Run candidates that are likely to fit, fastest first, until `count` alternatives do."""
        pool = self.pool
        while len(self.found) < count and self._may_go_on():
            likely = (one for one in self.list_promising(order) if pool.expected_part(one) <= LIKELY)
            while len(self.found) + len(self.pending) < count and self._may_go_on():
                batch = self._take_batch(likely)
                if not batch:
                    break
                self._probe(batch)
            if not self.pending:
                return
            self._run_pending()

    def _search_doubtful(self) -> None:
        """Run some candidates that are unlikely to fit but would beat the plans found, nearest to the card first."""
        for _ in range(MOST_DOUBTFUL):
            if self.runner.is_late:
                return
            doubtful = self.pool.list_doubtful([fitting.priced for fitting in self.found])
            batch = self._take_batch(self.list_promising(doubtful))
            if not batch:
                return
            self._probe(batch)
            self._run_pending()

    def _add_roomy(self, order: list[Priced]) -> bool:
        """Add the fastest plan that leaves room, if all plans nearly fill the card; return whether one does."""
        pool, room = self.pool, (1 - ROOM) * self.pool.capacity_bytes
        if any(fitting.estimate.peak.process_bytes <= room for fitting in self.found):
            return False
        roomier = (one for one in order if one not in pool.tried and pool.expected_part(one) <= 1 - ROOM)
        for priced in islice(filter(pool.is_possible, roomier), _MOST_ROOMY):
            self._probe([priced])
            self.pending = [one for one in self.pending if pool.expected_part(one) <= 1 - ROOM]
            for fitting in self._run_whole():
                if fitting.estimate.peak.process_bytes <= room:
                    self.found = sort_by_time([*self.found, fitting])
                    return True
        return False

    def list_promising(self, order: list[Priced]) -> Iterator[Priced]:
        """Yield the candidates that are worth a run, by what is known when the next one is requested."""
        for priced in order:
            if self.found and priced.seconds_per_token > WORTH * self.found[0].priced.seconds_per_token:
                return
            if priced in self.pool.tried or self._is_superfluous(priced):
                continue
            if self.pool.is_possible(priced):
                yield priced

    def _is_superfluous(self, priced: Priced) -> bool:
        """Return whether a plan like it is at least as fast, and fits or seems to fit."""
        alike = (rival for rival in self._list_rivals() if is_alike(priced.candidate, rival.candidate))
        return any(not _is_faster(priced, rival) for rival in alike)

    def _list_rivals(self) -> list[Priced]:
        """Return the plans found and those that seem to fit."""
        return [*(fitting.priced for fitting in self.found), *self.pending]

    def _take_batch(self, candidates: Iterator[Priced]) -> list[Priced]:
        """Return the next candidates to probe: as many as the workers can run at once."""
        first = next(candidates, None)
        if first is None:
            return []
        more = 0 if choose_probe_depths(first.candidate.job, first.candidate.plan) else self.runner.worker_count - 1
        return [first, *islice(candidates, more)]

    def _probe(self, batch: list[Priced]) -> None:
        """Probe candidates, and note those that seem to fit."""
        pool = self.pool
        pool.tried |= set(batch)
        certain = [priced for priced in batch if pool.is_certain(priced)]
        uncertain = [priced for priced in batch if priced not in certain]
        needs = self.runner.probe([priced.candidate for priced in uncertain], self.question.cluster)
        self.pending += certain
        for priced, need in zip(uncertain, needs, strict=True):
            if not isinstance(need, Need):
                self.refusals.add_failure(priced, need)
                continue
            pool.expectation.add_probe(priced, need.uncached_bytes)
            likely_bytes = need.uncached_bytes * pool.expectation.whole_to_probe(priced, 1 / EDGE)
            if pool.capacity_bytes < need.uncached_bytes <= self.question.cluster.device.capacity_bytes:
                self.near.append(priced)
            if need.uncached_bytes > pool.capacity_bytes:
                self.refusals.add_too_large(priced, self._describe_need(need.process_bytes))
            elif likely_bytes <= pool.capacity_bytes or pool.is_worthwhile(priced, self._list_rivals()):
                self.pending.append(priced)
            else:
                pool.deferred.add(priced)

    def _run_pending(self) -> None:
        """Run whole what seems to fit, and keep the fastest of plans that are alike."""
        ordered = sort_by_time([*self.found, *self._run_whole()])
        self.found = [
            fitting
            for place, fitting in enumerate(ordered)
            if not any(is_alike(fitting.priced.candidate, faster.priced.candidate) for faster in ordered[:place])
        ]

    def _run_whole(self) -> list[Fitting]:
        """Return those of the pending candidates that fit when run whole; what failed since may rule some out."""
        pending, self.pending = list(filter(self.pool.is_possible, self.pending)), []
        self.pool.reconsider_deferred()
        capacity, cluster = self.pool.capacity_bytes, self.question.cluster
        answers = self.runner.run_whole([priced.candidate for priced in pending], cluster, capacity)
        fitting = []
        for priced, answer in zip(pending, answers, strict=True):
            if not isinstance(answer, Estimate):
                self.refusals.add_failure(priced, answer)
                continue
            peak = answer.peak.process_bytes
            self.pool.expectation.add_whole_run(priced, peak if answer.fits_card else max(peak, capacity))
            if answer.fits_card and peak > capacity:
                self.near.append(priced)
            if fits(answer, self.question):
                fitting.append(Fitting(priced, answer))
                self.progress(f"fits: {describe(priced.candidate)}")
            elif fits_card(answer, self.question):
                why = explain_host_limit(host_bytes(answer), self.question)
                self.refusals.add(describe(priced.candidate), why)
            else:
                need = self._describe_need(peak) if answer.fits_card else f"more than {format_gib(capacity)}"
                self.refusals.add_too_large(priced, need)
        return fitting

    def _describe_need(self, needed_bytes: int) -> str:
        """Return the bytes, and that they are more than the headroom leaves, if the card has them."""
        is_near = needed_bytes <= self.question.cluster.device.capacity_bytes
        return format_gib(needed_bytes) + (f" leaves less than {self.question.headroom:.3g} free" if is_near else "")


def _is_faster(one: Priced, other: Priced) -> bool:
    return one.seconds_per_token < other.seconds_per_token
