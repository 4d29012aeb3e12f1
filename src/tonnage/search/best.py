"""The search: candidates in the order of their predicted time, until enough of them fit on the ghost.

A candidate is looked at only if nothing speaks against it: the least memory that it needs is within the card, runs
so far let it hope, its techniques take the job, and no candidate that needs less has failed already.  What seems to
fit is run whole, as many as are wanted side by side; only what was run whole is shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from math import inf
from typing import Final

from tonnage.case import Case
from tonnage.errors import UsageError
from tonnage.estimates.estimate import Estimate
from tonnage.estimates.step_time import as_time
from tonnage.planner.solution import Candidate, Choice, Refused
from tonnage.plans import CHUNK_TOKENS
from tonnage.search import space
from tonnage.search.depth import Need
from tonnage.search.expectation import Expectation
from tonnage.search.memory import Ask, Failure, Ghosts
from tonnage.search.needs import FEW, after, most_telling, needs_no_less
from tonnage.search.pricing import Priced, bounded, in_order, priced
from tonnage.search.space import FREE, OFFLOADS, Question
from tonnage.search.words import describe
from tonnage.shallow.few import depths
from tonnage.techniques.attention import CANNOT_SERVE
from tonnage.trainers.cases import check
from tonnage.units import counted, gib

MOST_RUNS: Final = 60
"""Candidates that are run before the search is content with what it has."""

WORTH: Final = 3.0
"""An alternative may take so many times as long as the best plan."""

LIKELY: Final = 1.02
"""Candidates that are expected to need up to so many times the card are looked at in the order of their time."""

EDGE: Final = 0.97
"""What seems to need more than this part of the card is run whole only if it would be the fastest: what the allocator
keeps in reserve may be more than the rest."""

SMALL: Final = 100
"""Combinations up to which the fastest of all that fit is found.  Among more, what is not expected to fit is run only
if it would be faster by more than `_HARDLY`."""

_HARDLY: Final = 0.005
"""Part of a step's time that is far less than what is known of it: 5.5 % in the median (docs/reference/time.md)."""

SURE: Final = 0.93
"""Part of the card up to which a plan that was looked at is explained ahead, before it was run whole.

Whole runs needed 1.01 to 1.12 of what looks had shown, three of four up to 1 / SURE (22 plans of seven questions of
benchmarks/search.py, 2026-11-27)."""

MOST_DOUBTFUL: Final = 8
"""How many that are not likely to fit, but may, are looked at in the end if they would beat what was found."""

DIFFERENT: Final = 1.0
"""How far alternatives are apart at least, see `difference`."""

ROOM: Final = 0.15
"""Part of what may be used that one of the plans leaves free, where there are at least `WITH_ROOM` of them."""

WITH_ROOM: Final = 3
"""Plans asked for, from which on one of them leaves room."""

AHEAD: Final = 2
"""Candidates that idle workers run because they are likely to be next."""

SLICES: Final = 4
"""Of a micro-batch's loss, up to which all logits at once may need less than slices of them do, which leave holes
between blocks."""

_WORTH_LOGITS: Final = 0.995
"""Part of the fastest plan's time that one may take with all logits at once: in slices the head multiplies twice."""

_NEARLY: Final = 1.05
"""What needs up to so many times the card by slices may fit without."""

SAME_FAILURES: Final = 6
"""Candidates without parallel dimensions that fail in the same words, after which a method is not tried any more if
nothing of it ever ran."""

_MOST_ROOMY: Final = 2
"""Candidates that are tried to find that one."""

_WEIGHTS: Final = {"tp": 1.0, "pp": 1.0, "ep": 1.0, "cp": 0.5}
"""Of using a parallel dimension or not."""

_PARTS: Final = {"zero1": 1, "zero2": 2, "zero3": 3, "hsdp": 3}
"""What is divided among the ranks: states, gradients, weights."""

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
    afterwards: Callable[[Candidate], Sequence[Ask]] = lambda best: ()
    """What will be asked besides when the search has ended with this plan as the best."""
    found: list[tuple[Priced, Estimate]] = field(default_factory=list)
    """Plans that fit, fastest first, no two of the same kind."""
    too_large: list[Priced] = field(default_factory=list)
    """Those that were run and do not."""
    refused: dict[str, Refused] = field(default_factory=dict)
    """Techniques that do not take the job, and faster plans that do not fit."""
    seem: list[Priced] = field(default_factory=list)
    """Those that were looked at, seem to fit and are to be run whole."""
    seen: set[int] = field(default_factory=set)
    """The identities of all that were looked at or run."""
    put_off: set[int] = field(default_factory=set)
    """The identities of those that were looked at and would not be the fastest for all their need."""
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How many without parallel dimensions failed, by method and words."""
    broken: dict[str, str] = field(default_factory=dict)
    """Options that are nothing for this network on this card, each with why: parallel dimensions, flex attention."""
    impossible: set[int] = field(default_factory=set)
    """The identities of those that need no run to be refused."""
    expected: Expectation = field(default_factory=Expectation)
    """What runs so far say of those to come."""
    order: list[Priced] = field(default_factory=list)
    """Candidates, fastest first."""
    first: int = 0
    """How many plans of different kinds are looked for before one that leaves room."""
    top: int = 0
    """How many plans are looked for."""
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("priced", "below_bound", "ruled_out"), 0))
    """How many candidates met which end without a run."""

    def run(self, top: int, *, doubtful: bool = True) -> None:
        """Find `top` plans of different kinds; with the host's memory only where there is none without.

        `doubtful`: also look at faster ones that are not likely to fit, but may.
        """
        self._run_places(top, doubtful)
        if not self.found and "attention" in self.broken and self.narrowed != self.question:
            self._begin_again(self.narrowed)  # all plans had it
            self._run_places(top, doubtful)

    def _begin_again(self, question: Question) -> None:
        """Nothing is kept of candidates that are gone: others may get their identities, and need otherwise."""
        self.question = question
        self.seem, self.too_large, self.order = [], [], []
        self.seen, self.put_off, self.impossible = set(), set(), set()
        self.failures, self.expected = Counter(), Expectation()

    def _run_places(self, top: int, doubtful: bool) -> None:
        for place in self.question.places:
            every = list(space.candidates(self.question, **place))
            if every:
                self.ghosts.start()
            order = self._priced(every)
            where = " with files" if place.get("files") else " with offload" if place["offload"] else ""
            priced = f"{counted(len(order), 'combination')}{where} priced"
            self.say(f"{priced}; running the fastest")
            first = max(top - 1, 1) if top >= WITH_ROOM else top
            self.order, self.first, self.top = order, first, top
            self._rule_out(order)
            self._verify(order, first)
            if doubtful:
                self._verify_doubtful()
            if not self.found and (whole := self._nearly_fitting()):
                self.order = whole
                self._verify(whole, first)
            if self.found:
                del self.found[first:]
                if first < top and not self._leaves_room(order):
                    self._verify(order, top)
                return

    def try_smallest(self, small: Sequence[Candidate]) -> None:
        """Look at those that need least, whatever was expected of them, before it is said that nothing fits."""
        tried = [other.candidate for other in self.too_large]
        new = [bounded(one, self.question.cluster) for one in small if one not in tried]
        for one in in_order(new, self.question.cluster):
            self._look([one])
            self._run()
            if self.found:
                return

    def _priced(self, every: list[Candidate]) -> list[Priced]:
        """Those that may fit by what they cannot do without, fastest first."""
        known = [bounded(one, self.question.cluster) for one in every]
        fitting = [one for one in known if one.least_bytes <= self._capacity]
        possible = [one for one in fitting if within_host(one.host_bytes, self.question)]
        if len(possible) < len(fitting):
            least = min(one.host_bytes for one in fitting if not within_host(one.host_bytes, self.question))
            self._refuse("offload to the host", host_lacks(least, self.question, at_least=True))
        self.counts["below_bound"] += len(every) - len(possible)
        self.counts["priced"] += len(possible)
        return in_order(possible, self.question.cluster)

    def _rule_out(self, order: list[Priced]) -> None:
        """Where the least says little, look at those first that decide about half of the others.

        Else many are looked at that do not fit by far, one after the other.  Who seems to fit has its turn later.
        """
        rough = [one for one in order if one.rough]
        unknown = {id(one.candidate): one for one in self._hopeful(rough)}
        open_ = [one.candidate for one in unknown.values()]
        while len(open_) > FEW:
            candidate = most_telling(open_)
            one = unknown[id(candidate)]
            (need,) = self.ghosts.need([candidate], self.question.cluster)
            if not isinstance(need, Need):
                self.seen.add(id(one))
                self._fails(one, need)
                open_.remove(candidate)
                continue
            self.expected.look(one, need.least_bytes)
            fits = need.least_bytes <= self._capacity
            if not fits:
                self.seen.add(id(one))
                self._does_not_fit(one, gib(need.process_bytes))
            open_ = after(open_, candidate, fits)

    def _verify(self, order: list[Priced], top: int) -> None:
        """Run those that are likely to fit, fastest first, until `top` kinds of them do."""
        while len(self.found) < top and self._tried < MOST_RUNS:
            likely = (one for one in self._hopeful(order) if self._expected_part(one) <= LIKELY)
            while len(self.found) + len(self.seem) < top and self._tried < MOST_RUNS:
                batch = self._batch(likely)
                if not batch:
                    break
                self._foresee(batch)
                self._look(batch)
            if not self.seem:
                return
            self._run()

    def _verify_doubtful(self) -> None:
        """Run some that are not likely to fit, but would beat what was found: those nearest to the card first."""
        for _ in range(MOST_DOUBTFUL):
            doubtful = self._doubtful([one for one, _ in self.found])
            batch = self._batch(self._hopeful(doubtful))
            if not batch:
                return
            self._foresee(batch)
            self._look(batch)
            self._run()

    def _nearly_fitting(self) -> list[Priced]:
        """Those that nearly fit with the loss in a few slices, with all logits at once, fastest first."""
        if not self._may_be_whole:
            return []
        near = [one for one in self.too_large if self._expected_part(one) <= _NEARLY]
        few = [one.candidate for one in near if one.tokens_at_once <= SLICES * CHUNK_TOKENS]
        return self._priced([_with_all_logits(one) for one in few])

    def with_all_logits(self) -> None:
        """Give plans that were found all logits at once where there is room, and that makes them the fastest."""
        wholes, cluster = self._wholes(), self.question.cluster
        needs = self.ghosts.need([one.candidate for one in wholes.values()], cluster)
        asked = {
            sliced: one.candidate
            for (sliced, one), need in zip(wholes.items(), needs, strict=True)
            if isinstance(need, Need) and need.least_bytes <= self._capacity
        }
        answers = dict(zip(asked, self.ghosts.fit(list(asked.values()), cluster, self._capacity), strict=True))
        for place, (sliced, _) in enumerate(self.found):
            answer = answers.get(id(sliced))
            if isinstance(answer, Estimate) and fits(answer, self.question):
                self.found[place] = wholes[id(sliced)], answer
        self.found.sort(key=lambda pair: pair[0].seconds_per_token)

    def _wholes(self) -> dict[int, Priced]:
        """Of plans that were found, by their identities, with all logits: those that would lead."""
        return {id(one): whole for one, _ in self.found if (whole := self._leading_whole(one))}

    def _leading_whole(self, sliced: Priced) -> Priced | None:
        """A plan with all logits at once; None if that is not the fastest."""
        return self._whole(sliced, self.found[0][0].seconds_per_token)

    def _whole(self, sliced: Priced, fastest_seconds: float) -> Priced | None:
        """A plan with all logits at once; None if it is slower than the fastest plan's seconds a token are worth."""
        plan = sliced.candidate.plan
        if not self._may_be_whole or plan.loss != FREE["loss"] or plan.checkpointing.startswith("budget"):
            return None  # a budget has filled the card
        whole = priced(_with_all_logits(sliced.candidate), self.question.cluster)
        if whole.timing is None or whole.seconds_per_token > _WORTH_LOGITS * fastest_seconds:
            return None
        return whole

    def _roomy_wholes(self) -> dict[int, Priced]:
        """Those of them that are likely to fit, if they need of what is usual as much as in slices."""
        wholes, found = self._wholes(), {}
        for sliced, estimate in self.found:
            whole = wholes.get(id(sliced))
            of_usual = (estimate.peak.process_bytes - sliced.least_bytes) / max(sliced.beyond_bytes, 1.0)
            if whole and whole.least_bytes + of_usual * whole.beyond_bytes <= self._capacity:
                found[id(sliced)] = whole
        return found

    @property
    def _may_be_whole(self) -> bool:
        """Whether it is ours to choose how the loss is computed."""
        return self.question.is_open("loss") and self.question.may_be("loss", "plain")

    def _doubtful(self, found: Sequence[Priced]) -> list[Priced]:
        """Those that may fit, are not likely to, and are faster than all that were found, by what is worth runs."""
        best = self._worth_runs * min((one.seconds_per_token for one in found), default=inf)
        faster = takewhile(lambda one: one.seconds_per_token < best, self.order)
        new = (one for one in faster if id(one) not in self.seen)
        doubtful = [one for one in new if LIKELY < self._expected_part(one) <= 1 + self.expected.error(one)]
        return sorted(doubtful, key=self._expected_part)

    def _leaves_room(self, order: list[Priced]) -> bool:
        """Where all plans nearly fill the card, add the fastest that does not; False if none was added."""
        room = (1 - ROOM) * self._capacity
        if any(estimate.peak.process_bytes <= room for _, estimate in self.found):
            return False
        roomier = (one for one in order if id(one) not in self.seen and self._expected_part(one) <= 1 - ROOM)
        for one in islice(filter(self._is_possible, roomier), _MOST_ROOMY):
            self._foresee([one])
            self._look([one])
            self.seem = [seeming for seeming in self.seem if self._expected_part(seeming) <= 1 - ROOM]
            for roomy, estimate in self._fitting():
                if estimate.peak.process_bytes <= room:
                    self.found.append((roomy, estimate))
                    self.found.sort(key=lambda pair: pair[0].seconds_per_token)
                    return True
        return False

    def _batch(self, some: Iterator[Priced]) -> list[Priced]:
        """The next candidates to be looked at: as many as there are workers for the runs that this takes."""
        first = next(some, None)
        if first is None:
            return []
        more = 0 if depths(first.candidate.job, first.candidate.plan) else self.ghosts.count - 1
        return [first, *islice(some, more)]

    def _expected_part(self, one: Priced) -> float:
        """Of what the card lets a process use."""
        return self.expected.bytes(one) / self._capacity

    def _look(self, batch: list[Priced]) -> None:
        """See what they need, and note those that seem to fit."""
        self.seen |= {id(one) for one in batch}
        certain = [one for one in batch if self._is_certain(one)]
        rest = [one for one in batch if one not in certain]
        needs = self.ghosts.need([one.candidate for one in rest], self.question.cluster)
        self.seem += certain
        for one, need in zip(rest, needs, strict=True):
            if not isinstance(need, Need):
                self._fails(one, need)
                continue
            self.expected.look(one, need.least_bytes)
            if need.least_bytes > self._capacity:
                self._does_not_fit(one, gib(need.process_bytes))
            elif need.least_bytes * self.expected.beyond(one, 1 / EDGE) <= self._capacity or self._would_lead(one):
                self.seem.append(one)
            else:
                self.put_off.add(id(one))

    def _is_certain(self, one: Priced) -> bool:
        """Whether runs so far say enough to run it whole without a look."""
        return self._expected_part(one) * (1 + self.expected.error(one)) <= 1

    def _foresee(self, batch: Sequence[Priced] = ()) -> None:
        """Let idle workers run ahead what comes after a batch if runs are as expected; this changes no answer."""
        found = [one for one, _ in self.found]
        seem = [one for one in self.seem if not self._was_too_large_ahead(one)]
        best = min([*found, *seem], key=lambda one: one.seconds_per_token, default=None)
        fitting = [one for one in batch if self._expected_part(one) <= 1]
        failing = [one for one in (*self.seem, *batch) if one not in seem and one not in fitting]
        after = list(islice(self._after([*found, *seem, *fitting], batch, failing), AHEAD))
        following = after[:1] if len(fitting) == len(batch) else []
        certain = [one for one in (*batch, *following) if self._is_certain(one)]
        certain += [one for one in after if id(one) in self.put_off]  # looked at, and now it leads
        cluster = self.question.cluster
        asks: list[Ask] = [(one.candidate, None) for one in batch if one not in certain]
        asks += [(one.candidate, cluster) for one in (*seem, *certain)]  # the longest runs
        wholes = self._roomy_wholes()
        asks += [(one.candidate, on) for one in wholes.values() for on in (None, cluster)]
        likely = [one for one in (*fitting, *after) if self._expected_part(one) <= 1]
        if (
            best is not None
            and not any(_faster(one, best) for one in likely)
            and (self._expected_part(best) <= SURE or any(one is best for one in found))
        ):
            asks += self.afterwards(self._to_explain(best, wholes).candidate)
        asks += [(one.candidate, None) for one in after if one not in certain and not self._is_certain(one)]
        self.ghosts.ahead(asks, cluster)

    def _to_explain(self, best: Priced, wholes: dict[int, Priced]) -> Priced:
        """What the best plan so far will be shown as: with all logits at once if there is likely to be room."""
        if any(one is best for one, _ in self.found):
            return wholes.get(id(best), best)
        whole = self._whole(best, best.seconds_per_token)
        return whole if whole is not None and self._is_certain(whole) else best

    def _was_too_large_ahead(self, one: Priced) -> bool:
        """Whether a worker has run it ahead and it does not fit: a guess may know that before the search asks."""
        answer = self.ghosts.made_ahead(one.candidate, self.question.cluster)
        return isinstance(answer, Estimate) and not fits(answer, self.question)

    def _after(self, supposed: list[Priced], batch: Sequence[Priced], failing: Sequence[Priced]) -> Iterator[Priced]:
        """Who is likely to be looked at next, behind a batch, if these are found and those fail: in `run`'s order."""

        def is_open(one: Priced) -> bool:
            less = (other.candidate for other in failing)
            return self._is_open(one, batch) and not any(needs_no_less(one.candidate, other) for other in less)

        if not batch:
            fastest = self._worth_runs * min((one.seconds_per_token for one in supposed), default=inf)
            again = (one for one in self.order if id(one) in self.put_off)
            yield from (one for one in again if one.seconds_per_token < fastest)
        if len(supposed) >= self.first and not batch:
            yield from islice(filter(is_open, self._doubtful(supposed)), 1)
        for one in self.order:
            if len(supposed) >= self.top:
                return
            roomy = self.top > self.first <= len(supposed) and all(
                self._expected_part(other) > 1 - ROOM for other in supposed
            )
            if not roomy and any(alike(one, other) and not _faster(one, other) for other in supposed):
                continue
            if self._expected_part(one) <= (1 - ROOM if roomy else LIKELY) and is_open(one):
                supposed = [*supposed, one]
                yield one

    def _is_open(self, one: Priced, batch: Sequence[Priced]) -> bool:
        """Whether nothing is known of it, nor asked."""
        passed = id(one) in self.seen or id(one) in self.impossible or any(one is other for other in batch)
        return not passed and self._obstacle(one) is None

    def _would_lead(self, one: Priced) -> bool:
        others = (*(other for other, _ in self.found), *self.seem)
        return all(one.seconds_per_token < self._worth_runs * other.seconds_per_token for other in others)

    @property
    def _worth_runs(self) -> float:
        """Part of the fastest plan's time from which on one that is not expected to fit is not worth its runs."""
        return 1 - _HARDLY if len(self.order) > SMALL else 1.0

    def _run(self) -> None:
        """Run whole what seems to fit, and keep the fastest of those that are alike."""
        self._foresee()
        self.found += self._fitting()
        self.found.sort(key=lambda pair: pair[0].seconds_per_token)
        self.found = [
            pair
            for place, pair in enumerate(self.found)
            if not any(alike(pair[0], faster) for faster, _ in self.found[:place])
        ]

    def _fitting(self) -> list[tuple[Priced, Estimate]]:
        """Those that seem to fit and do."""
        seem, self.seem = self.seem, []
        self.seen -= self.put_off  # without those before them they may lead
        self.put_off = set()
        answers = self.ghosts.fit([one.candidate for one in seem], self.question.cluster, self._capacity)
        found = []
        for one, answer in zip(seem, answers, strict=True):
            if not isinstance(answer, Estimate):
                self._fails(one, answer)
                continue
            peak = answer.peak.process_bytes
            self.expected.learn(one, peak if answer.fits else max(peak, self._capacity))
            if fits(answer, self.question):
                found.append((one, answer))
                self.say(f"fits: {describe(one.candidate)}")
            elif fits_card(answer, self.question):
                self._refuse(describe(one.candidate), host_lacks(host_bytes(answer), self.question))
            else:
                self._does_not_fit(one, gib(peak) if answer.fits else f"more than {gib(self._capacity)}")
        return found

    def _fails(self, one: Priced, why: Failure) -> None:
        """It was tried and cannot be run, which says more than what was never tried."""
        if all(getattr(one.candidate.plan, axis) == 1 for axis in space.AXES):
            self.failures[one.candidate.job.method, str(why)] += 1
        option = _at_fault(one.candidate, str(why))
        if option is not None:
            self.broken[option] = str(why)
        what = option or describe(one.candidate)
        self._refuse(what, str(why))
        self.refused = {what: self.refused[what], **self.refused}

    @property
    def narrowed(self) -> Question:
        """The question without the options that are nothing for this network."""
        asked = self.question
        gone = [option for option in self.broken if asked.is_open(option) and option not in asked.only]
        return replace(asked, without=(*asked.without, *gone))

    def _does_not_fit(self, one: Priced, need: str) -> None:
        self.too_large.append(one)
        self._refuse(describe(one.candidate), f"does not fit: {need}", faster=True)

    def _hopeful(self, order: list[Priced]) -> Iterator[Priced]:
        """Those that are worth a run, as things stand when the next is asked for."""
        for one in order:
            if self.found and one.seconds_per_token > WORTH * self.found[0][0].seconds_per_token:
                return
            others = [other for other, _ in self.found] + self.seem
            if id(one) in self.seen or any(alike(one, other) and not _faster(one, other) for other in others):
                continue
            if self._is_possible(one):
                yield one

    def _is_possible(self, one: Priced) -> bool:
        """Whether nothing but a run could say that a candidate does not fit, or cannot be run."""
        if id(one) in self.impossible or self._never_runs(one.candidate.job.method):
            return False
        obstacle = self._obstacle(one)
        if obstacle is None:
            return True
        if isinstance(obstacle, UsageError):
            what, _, why = str(obstacle).partition(": ")
            self._refuse(what, why)
        else:
            self.counts["ruled_out"] += 1
        self.impossible.add(id(one))
        return False

    def _never_runs(self, method: str) -> bool:
        """Whether enough candidates of a method failed in the same words, and none of them ran."""
        most = max((number for (of, _), number in self.failures.items() if of == method), default=0)
        return most >= SAME_FAILURES and not self.expected.has_seen(method)

    def _obstacle(self, one: Priced) -> Candidate | UsageError | None:
        """What says without a run that a candidate does not fit, one that failed, or that it cannot be run."""
        for other in self.too_large:
            if needs_no_less(one.candidate, other.candidate):
                return other.candidate
        for option, why in self.broken.items():
            if _has(one.candidate, option):
                return UsageError(f"{option}: {why}")
        try:
            check(Case(one.candidate.job, one.candidate.plan, self.question.cluster))
        except UsageError as error:
            return error
        return None

    @property
    def _tried(self) -> int:
        return len(self.seen)

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
                estimate=estimate if one.timing is None else replace(estimate, time=as_time(one.timing)),
            )
            for place, (one, estimate) in enumerate(self.found)
        )


def _with_all_logits(candidate: Candidate) -> Candidate:
    return replace(candidate, plan=replace(candidate.plan, loss="plain"))


def fits(estimate: Estimate, question: Question) -> bool:
    """Within the card and its headroom, and within the host's memory."""
    return fits_card(estimate, question) and within_host(host_bytes(estimate), question)


def fits_card(estimate: Estimate, question: Question) -> bool:
    """Within the card and its headroom."""
    return estimate.fits and estimate.peak.process_bytes <= question.budget_bytes


def host_bytes(estimate: Estimate) -> int:
    """Of the host's memory, what the processes of a machine have at their peak; 0 where it is not known."""
    return (estimate.host.peak_bytes or 0) * int(estimate.cluster["gpus_per_node"])


def within_host(needed_bytes: int, question: Question) -> bool:
    """Whether a machine's host has so much, or may have."""
    return needed_bytes <= question.host_limit_bytes


def host_lacks(needed_bytes: int, question: Question, *, at_least: bool = False) -> str:
    """Why a machine does not do, where its host has less than it takes, or takes `at_least`."""
    has = gib(question.host_limit_bytes)
    known = question.host_memory_bytes is not None
    whose = (
        f"which has {has}"
        if known
        else f"more than the largest have for so many GPUs, {has} (--host-memory says what yours has)"
    )
    needed = f"at least {gib(needed_bytes)}" if at_least else gib(needed_bytes)
    return f"needs {needed} of host memory on each machine, {whose}"


def difference(one: Priced, other: Priced) -> float:
    """How far two plans are apart as alternatives: by what a user would call another way to train.

    A parallel dimension more, another kind of sharding, of checkpointing, of arithmetic, of offload; its degree, the
    micro-batch and fine print do not count.
    """
    plan, others = one.candidate.plan, other.candidate.plan
    apart = sum(
        weight for name, weight in _WEIGHTS.items() if (getattr(plan, name) > 1) != (getattr(others, name) > 1)
    )
    apart += abs(_PARTS.get(plan.shard, 0) - _PARTS.get(others.shard, 0)) / 2
    apart += float(one.candidate.job.method != other.candidate.job.method)
    names = ("checkpointing", "precision", "optimizer", *OFFLOADS)
    return apart + float(sum(getattr(plan, name) != getattr(others, name) for name in names))


def _at_fault(candidate: Candidate, why: str) -> str | None:
    """The option for which a candidate failed and all that have it would."""
    found = [axis for axis in space.AXES if _has(candidate, axis) and why.endswith(f"; choose {axis} 1.")]
    if _has(candidate, "attention") and any(words in why for words in _NOT_SERVED):
        found.append("attention")
    return next(iter(found), None)


_NOT_SERVED: Final = ("flex_attention", CANNOT_SERVE)
"""What a failure says that is of an attention's kernels: Inductor's name for flex's, and that torch has none."""


def _has(candidate: Candidate, option: str) -> bool:
    if option in space.AXES:
        return bool(getattr(candidate.plan, option) > 1)
    return candidate.plan.attention != "auto"


def alike(one: Priced, other: Priced) -> bool:
    """Whether showing both would be showing one plan twice."""
    return difference(one, other) < DIFFERENT


def _faster(one: Priced, other: Priced) -> bool:
    return one.seconds_per_token < other.seconds_per_token
