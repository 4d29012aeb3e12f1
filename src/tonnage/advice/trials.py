"""Try changes on ghosts: single ones first, then further ones upon those that come nearest.

The case is run on a card without a limit, which tells what holds the bytes at its peak.  Every change that may gain
something is run there as well.  Where it still does not fit, the changes that may help the changed case come next, so
that pairs and triples are made of what is at stake after the first change.

    trials = Trials(case, run_without_limit(case, runner).peak, runner)
    trials.run()
    trials.best()
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

from tonnage.advice.changes import (
    NOTHING,
    Change,
    apply,
    limit_together,
    list_changes,
    list_host_changes,
    resize_batch,
)
from tonnage.advice.hardware import list_cards, list_clusters
from tonnage.case import Case
from tonnage.estimates import predict
from tonnage.estimates.estimate import Estimate, Host, Peak
from tonnage.planner.trial_runner import TrialRunner
from tonnage.shallow.depths import roomy

if TYPE_CHECKING:
    from tonnage.workers.worker import Worker

SHOWN: Final = 8
"""Changes that are shown at most."""

_LEADING: Final = 3
"""Single changes that are tried even if they cannot suffice alone: others may follow them."""

_ENOUGH: Final = 2
"""Changes that fit, keep steps fast and leave the mathematics alone, with which no further ones are looked for."""

_ROUNDS: Final = 3
"""Rounds of further changes after the single ones."""

_TOGETHER_AT_MOST: Final = 4
"""Further changes that are tried all at once."""

_NEAREST: Final = 2
"""Cases that do not fit, on each of which further changes are tried."""

_FURTHER: Final = 3
"""Further changes of each."""

_PATIENCE_SECONDS: Final = 8.0
"""Time after which no further round of changes begins, if something fits."""

_MOST_SECONDS: Final = 60.0
"""Time after which no further round begins at all."""


@dataclass(frozen=True)
class Trial:
    """One case to be run, as `tonnage estimate` runs it."""

    case: Case
    rank: int | None = None
    """The only rank to run; None: all that differ."""
    steps: int | None = None
    """Number of steps; None: as many as `tonnage estimate` runs."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Return what decides the answer."""
        job, plan, cluster = self.case.job, self.case.plan, self.case.cluster
        shape = tuple(getattr(job, item.name) for item in fields(job) if item.name != "model")
        run = (plan, cluster, self.rank, self.steps)
        return ("advice", job.model.name, json.dumps(job.model.config, sort_keys=True), *shape, *run)

    def execute(self, worker: Worker) -> Estimate:
        """Return the estimate."""
        return predict.answer(self.case, rank=self.rank, steps=self.steps, worker=worker, few_layers=True).estimate


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A change that was run."""

    change: Change
    case: Case
    """The changed case."""
    estimate: Estimate
    """The estimate of the changed case: on its cards if it fits, else on cards without a limit."""
    fits: bool

    @property
    def peak_bytes(self) -> int:
        """Return the peak of its process."""
        return self.estimate.peak.process_bytes

    @property
    def host_bytes(self) -> int | None:
        """Return the host memory that a machine needs; None if unknown."""
        return self.estimate.host.machine_bytes

    @property
    def is_tight(self) -> bool:
        """Return True if it fits, but the upper end of its interval does not."""
        return self.fits and self.estimate.peak.high_bytes > self.case.cluster.device.capacity_bytes

    @property
    def held_bytes(self) -> int:
        """Return the peak without what the allocator only keeps in reserve."""
        return _held_bytes(self.estimate.peak)

    @property
    def missing_bytes(self) -> int:
        """Return how many bytes must be gained at least."""
        return self.held_bytes - self.case.cluster.device.capacity_bytes

    @property
    def step_seconds(self) -> float | None:
        """Return the seconds of its step."""
        seconds = self.estimate.time.get("step_seconds")
        return None if seconds is None else float(seconds)


def _held_bytes(peak: Peak) -> int:
    return peak.process_bytes - peak.by_category.get("cached", 0)


def run_without_limit(
    case: Case, runner: TrialRunner, rank: int | None = None, steps: int | None = None
) -> Estimate | None:
    """Return the estimate of a case on cards without a limit; None if it cannot be run there either."""
    (answer,) = runner.run_all([Trial(replace(case, cluster=roomy(case.cluster)), rank, steps)])
    return answer if isinstance(answer, Estimate) and answer.fits_card else None


class Trials:
    """The changes of one case that were tried so far."""

    def __init__(
        self,
        case: Case,
        peak: Peak,
        runner: TrialRunner,
        *,
        host: Host | None = None,
        rank: int | None = None,
        steps: int | None = None,
        with_room: bool = False,
        accepts: Callable[[Change], bool] = lambda change: True,
        found: Callable[[Change], None] = lambda change: None,
    ) -> None:
        """Prepare trials of a case with this peak on cards without a limit, of changes that the user `accepts`.

        `host`: its host memory, if that may be too little.  `with_room`: what fits barely is not enough.  `found` is
        called with each change that fits, as soon as that is known.
        """
        self._found = found
        self._accepts = accepts
        self._case, self._peak, self._runner, self._with_room = case, peak, runner, with_room
        self._rank, self._steps = rank, steps
        self._short_host = host if host is not None and not host.fits else None
        self._began = time.monotonic()
        self._tried: list[Tried] = []
        self._seen: set[str] = set()

    def run(self) -> None:
        """Try changes until there are enough that fit, or no time is left."""
        single = list_changes(self._case, self._peak)
        missing_bytes = _held_bytes(self._peak) - self._case.cluster.device.capacity_bytes
        leading = [change for change in single if not change.changes_mathematics and not change.is_slow][:_LEADING]
        self._try(
            (NOTHING, change)
            for change in single
            if change in leading
            or change.changes_mathematics
            or limit_together([change], self._peak) >= missing_bytes
        )
        if self._short_host is not None:
            self._try((NOTHING, change) for change in list_host_changes(self._case, self._short_host))
        self._enlarge_batch()
        for number in range(_ROUNDS):
            groups = self._open_groups(is_first=number == 0)
            self._try([pair for group in groups for pair in self._list_further(group)])
        if self._spent_seconds < 2 * _PATIENCE_SECONDS:
            self._try(self._list_smaller())
        if not any(one.fits and not one.change.changes_mathematics for one in self._tried):
            self._try_hardware()

    @property
    def _spent_seconds(self) -> float:
        return time.monotonic() - self._began

    def best(self) -> list[Tried]:
        """Return the changes to show: those that fit, the smallest first.

        If all of them need other cards, also the one that comes nearest on these.
        """
        gaining = [one for one in self._tried if self._gains(one)]
        fitting = [one for one in gaining if one.fits and not self._contains_fitting(one) and not self._is_worse(one)]
        if any(one.change.cluster is None for one in fitting):
            return sorted(fitting, key=_order)[:SHOWN]
        missed = (one for one in gaining if not one.fits)
        return [*sorted(fitting, key=_order), *sorted(missed, key=lambda one: one.peak_bytes)[:1]]

    def _enlarge_batch(self) -> None:
        """Find the largest micro-batch that fits, of those that are the present one in halves."""
        sizes = {one.change.options["micro_batch"]: one for one in self._tried if one.change.options.keys() <= _BATCH}
        fitting = [size for size, one in sizes.items() if one.fits]
        if not fitting:
            return
        smallest, largest = max(fitting), self._case.job.micro_batch
        while largest > 2 * smallest:
            size = smallest << (largest // smallest).bit_length() // 2
            self._try([(NOTHING, resize_batch(self._case, size, self._peak))])
            if self._tried[-1].fits and self._tried[-1].case.job.micro_batch == size:
                smallest = size
            else:
                largest = size
        self._tried = [
            one
            for one in self._tried
            if not (one.change.options.keys() <= _BATCH and one.fits and one.case.job.micro_batch < smallest)
        ]

    def _open_groups(self, *, is_first: bool) -> Iterator[list[Tried]]:
        """Yield the tried changes with the same mathematics, where not enough of them fit and time is left."""
        groups: dict[str, list[Tried]] = {}
        for one in self._tried:
            if one.change.cluster is None:
                groups.setdefault(_mathematics(one.case), []).append(one)
        for members in groups.values():
            keeps = not members[0].change.changes_mathematics
            fitting = sum(one.fits and not one.change.is_slow for one in members)
            patience = _PATIENCE_SECONDS if fitting or not keeps else _MOST_SECONDS
            if fitting < (_ENOUGH if keeps else 1) and (is_first or self._spent_seconds < patience):
                yield members

    def _list_further(self, group: Sequence[Tried]) -> Iterator[tuple[Change, Change]]:
        """Yield the nearest of a group with further changes that may make it fit and leave the mathematics alone.

        Single ones, and the leading ones all at once: of those that are not needed, some are taken back in the end.
        """
        missed = [one for one in group if not one.fits and not one.change.is_slow and self._gains(one)]
        for nearest in sorted(missed, key=lambda one: one.peak_bytes)[:_NEAREST]:
            peak, missing_bytes = nearest.estimate.peak, nearest.missing_bytes
            listed = list_changes(nearest.case, peak)
            more = [one for one in listed if not one.changes_mathematics and not self._is_settled(one, nearest)]
            fast = [one for one in more if not one.is_slow]
            if limit_together(fast, peak) >= missing_bytes:
                yield from ((nearest.change, change) for change in fast[:_FURTHER])
                yield nearest.change, _combine(fast[:_TOGETHER_AT_MOST])
            elif limit_together(more, peak) >= missing_bytes:  # the slow ones first, of which few are steps to others
                more.sort(key=lambda one: not one.is_slow)
                enough = (change for change in more if limit_together([change], peak) >= missing_bytes)
                yield from ((nearest.change, change) for change in itertools.islice(enough, _FURTHER))
                yield nearest.change, _combine(more[:_TOGETHER_AT_MOST])

    def _list_smaller(self) -> Iterator[tuple[Change, Change]]:
        """Yield what fits with one of its changes taken back, where no part of it is known to fit."""
        for tried in [one for one in self._tried if one.fits and one.change.cluster is None]:
            if len(tried.change.options) > 2 and not self._contains_fitting(tried):
                for name in tried.change.options:
                    names = {name} | next((group for group in _ONE_CHANGE if name in group), frozenset())
                    kept = {other: value for other, value in tried.change.options.items() if other not in names}
                    yield NOTHING, replace(tried.change, options=kept)

    def _is_settled(self, change: Change, first: Tried) -> bool:
        """Return True if a change needs no other before it, or the host lacks the memory for it in any case."""
        return any(
            one.fits or (not one.estimate.host.fits and _mathematics(one.case) == _mathematics(first.case))
            for one in self._tried
            if one.change.options == change.options
        )

    def _contains_fitting(self, tried: Tried) -> bool:
        """Return True if a part of its changes fits as well, and is no slower."""
        own = tried.change.options.items()
        return any(
            one.fits and one is not tried and one.change.cluster is None and one.change.options.items() < own
            for one in self._tried
        )

    def _is_worse(self, tried: Tried) -> bool:
        """Return True if another of no more changes fits as well, with the same mathematics, less memory and time."""
        if tried.change.cluster is not None or tried.step_seconds is None:
            return False
        rivals = (one for one in self._tried if one.fits and one.change.cluster is None and one is not tried)
        return any(
            one.step_seconds is not None
            and _mathematics(one.case) == _mathematics(tried.case)
            and _count(one.change) <= _count(tried.change)
            and one.step_seconds <= tried.step_seconds
            and one.peak_bytes < tried.peak_bytes
            for one in rivals
        )

    def _gains(self, tried: Tried) -> bool:
        if self._short_host is not None:
            return tried.estimate.host.fits
        return tried.peak_bytes < self._peak.process_bytes or tried.change.cluster is not None

    def _try(self, pairs: Iterable[tuple[Change, Change]]) -> None:
        """Run each second change upon the first, on a card without a limit; then what may fit on its own card."""
        changes = list(self._new(change.after(first) for first, change in pairs))
        cases = [case for _, case in changes]
        answers = self._runner.run_all([self._trial(replace(case, cluster=roomy(case.cluster))) for case in cases])
        tight: list[Tried] = []
        for (change, case), answer in zip(changes, answers, strict=True):
            if not isinstance(answer, Estimate) or not answer.fits_card:
                continue
            capacity = case.cluster.device.capacity_bytes
            fits = self._is_within(answer.peak, capacity) and answer.host.fits
            tried = Tried(change=change, case=case, estimate=answer, fits=fits)
            if not tried.fits and tried.held_bytes <= capacity and not self._with_room:
                tight.append(tried)
            else:
                self._keep(tried)
        again = self._runner.run_all([self._trial(tried.case) for tried in tight])
        for tried, closer in zip(tight, again, strict=True):
            if isinstance(closer, Estimate) and closer.fits:
                tried = replace(tried, estimate=closer, fits=True)
            self._keep(tried)

    def _keep(self, tried: Tried) -> None:
        self._tried.append(tried)
        if tried.fits:
            self._found(tried.change)

    def _try_hardware(self) -> None:
        """Run the case as it is on larger cards, and sharded on more of the same, until the first of each fits."""
        cards = (Change(options={}, cluster=one) for one in list_cards(self._case.cluster, self._peak))
        kinds = [self._apply(changes) for changes in (cards, list_clusters(self._case, self._peak))]
        while kinds:
            each = max(1, self._runner.worker_count // len(kinds))
            waves = [list(itertools.islice(kind, each)) for kind in kinds]
            answers = iter(self._runner.run_all([self._trial(case) for wave in waves for _, case in wave]))
            fitting = [
                [
                    Tried(change=change, case=case, estimate=answer, fits=True)
                    for (change, case), answer in zip(wave, answers, strict=False)
                    if isinstance(answer, Estimate) and answer.fits
                ]
                for wave in waves
            ]
            for first, *_ in filter(None, fitting):
                self._keep(first)
            kinds = [kind for kind, wave, fits in zip(kinds, waves, fitting, strict=True) if wave and not fits]

    def _apply(self, changes: Iterable[Change]) -> Iterator[tuple[Change, Case]]:
        """Yield the changes that are accepted and not refused, with their cases."""
        for change in changes:
            if self._accepts(change) and (case := apply(change, self._case)) is not None:
                differs = _mathematics(case) != _mathematics(self._case)
                is_other_batch = change.cluster is not None and change.changes_mathematics
                yield replace(change, changes_mathematics=differs or is_other_batch), case

    def _new(self, changes: Iterable[Change]) -> Iterator[tuple[Change, Case]]:
        """Yield those of the changes that were not tried, with their cases."""
        for change, case in self._apply(changes):
            key = json.dumps(dict(change.options), sort_keys=True)
            if key not in self._seen:
                self._seen.add(key)
                yield change, case

    def _is_within(self, peak: Peak, capacity_bytes: int) -> bool:
        return (peak.high_bytes if self._with_room else peak.process_bytes) <= capacity_bytes

    def _trial(self, case: Case) -> Trial:
        return Trial(case, self._rank, self._steps)


def _combine(changes: Sequence[Change]) -> Change:
    """Return changes as one; of several that set the same option the first counts."""
    combined = NOTHING
    for change in changes:
        if not change.options.keys() & combined.options.keys():
            combined = change.after(combined)
    return combined


def _mathematics(case: Case) -> str:
    """Return what decides which numbers training computes."""
    job, plan = case.job, case.plan
    kind = "" if plan.optimizer.startswith("adamw") and plan.optimizer in _SAME_ADAMW else plan.optimizer
    return f"{job.method} {plan.precision} {kind} {job.seq_len}"


_SAME_ADAMW: Final = ("adamw", "adamw-loop", "adamw-foreach", "adamw-fused")
"""Implementations of one optimizer."""


def _count(change: Change) -> int:
    """Return how many changes it is; options that go together are one."""
    return len(change.options) - sum(names <= change.options.keys() for names in _ONE_CHANGE)


def _order(tried: Tried) -> tuple[bool, bool, bool, int, float]:
    """Return the sort key: the same cards and mathematics first, nothing on the host, few changes, fast steps."""
    change, seconds = tried.change, tried.step_seconds
    count = _count(change)
    return (
        change.cluster is not None,
        change.changes_mathematics,
        change.is_slow,
        count,
        float("inf") if seconds is None else seconds,
    )


_BATCH: Final = frozenset(("micro_batch", "grad_accum"))
"""Options of the batch of one rank."""

_ONE_CHANGE: Final = (_BATCH, frozenset(("shard", "param_offload")))
"""Options that count as one change."""
