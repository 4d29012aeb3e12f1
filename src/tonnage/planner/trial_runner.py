"""Run candidates on ghosts: a few warm workers side by side, each answer kept for the rest of the search.

with TrialRunner(progress) as runner:
    needs = runner.probe(candidates, cluster)          # one step of a few layers
    estimates = runner.run_whole(candidates, cluster)  # as they will be shown
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol, Self, TypeAlias

from tonnage.case import Case
from tonnage.cluster import Cluster
from tonnage.errors import CannotEstimate, GhostUnavailable, TonnageError, UnreadableModel, UsageError
from tonnage.estimates.estimate import Estimate
from tonnage.estimates.from_traces import combine
from tonnage.estimates.step_time import needs_counting
from tonnage.ghost.environment import any_libraries
from tonnage.planner.probe import Need, Probe, extrapolate, need_of
from tonnage.planner.scheduler import Scheduler, Task
from tonnage.planner.solution import Candidate
from tonnage.planner.trial_run import (
    ShownRun,
    is_quick,
    list_probes,
    probe_of,
    run_of_fullest_rank,
    runs_of_other_ranks,
)
from tonnage.shallow.depths import choose_probe_depths, layers_of

if TYPE_CHECKING:
    from tonnage.workers.worker import Worker

MOST_SECONDS: Final = 120
"""Seconds after which a search ends with what it has found, and explains only what is known already."""

Failure: TypeAlias = UsageError | CannotEstimate
"""Why a candidate could not be run."""

Answer: TypeAlias = Estimate | Probe | Failure
"""The answer of one trial run."""


class Runnable(Task, Protocol):
    """A task for a worker."""

    def execute(self, worker: Worker) -> Answer:
        """Return the answer.  Raises UsageError and CannotEstimate."""


class TrialRunner:
    """Workers that run candidates; a context manager that ends them all.

    An answer is an Estimate, a Need, or the error with which the candidate could not be run.  Raises GhostUnavailable
    and UnreadableModel, with which no other candidate would run either.
    """

    def __init__(self, progress: Callable[[str], None], count: int | None = None, torch: str | None = None) -> None:
        any_libraries()
        self._begun = time.monotonic()
        self._progress, self._torch = progress, torch
        self._worker_count = count or max(1, min(4, os.cpu_count() or 1))
        self._idle: SimpleQueue[Worker | None] = SimpleQueue()
        self._workers: list[Worker] = []
        self._scheduler: Scheduler[Runnable, Answer] = Scheduler(self._worker_count, self._execute)
        self._has_ended = False
        for _ in range(self._worker_count):
            self._idle.put(None)

    @property
    def run_count(self) -> int:
        """Return how many ranks of candidates were run, or taken from the cache of traces."""
        return self._scheduler.task_count

    @property
    def is_late(self) -> bool:
        """Return whether it has existed for MOST_SECONDS, after which only what is needed for an answer is run."""
        return time.monotonic() - self._begun > MOST_SECONDS

    @property
    def worker_count(self) -> int:
        """Return how many trial runs are executed at once."""
        return self._worker_count

    def warm_up(self, count: int | None = None) -> None:
        """Let `count` workers (default: all) import their libraries meanwhile."""
        for _ in range(self._worker_count if count is None else count):
            self._scheduler.call(self._warm_worker)

    def adopt(self, worker: Worker, *, closing: bool = True) -> None:
        """Use a worker that exists already before one that would be started, and close it if `closing`."""
        if closing:
            self._workers.append(worker)
        _, *others = [self._idle.get() for _ in range(self._worker_count)]
        for idle in (worker, *others):
            self._idle.put(idle)

    def run_all(self, runs: Sequence[Runnable]) -> list[Answer]:
        """Return the answers of any runs."""
        return [future.result() for future in [self._scheduler.submit(run) for run in runs]]

    def run_whole(
        self, candidates: Sequence[Candidate], cluster: Cluster, budget_bytes: int | None = None
    ) -> list[Estimate | Failure]:
        """Run each candidate whole on a card of the cluster; the estimate may say that it does not fit.

        Where ranks differ, the one that is likely to need most is run first.  The others are only run if it needs no
        more than `budget_bytes` (default: the card).
        """
        cards = _without_host(cluster)
        firsts = [self._scheduler.submit(run_of_fullest_rank(candidate, cards)) for candidate in candidates]
        others: list[list[Future[Answer]]] = []
        for candidate, first in zip(candidates, firsts, strict=True):
            fits = _is_within(first.result(), budget_bytes)
            runs = runs_of_other_ranks(candidate, cards) if fits else []
            others.append([self._scheduler.submit(run) for run in runs])
        answers = [[rank.result() for rank in (first, *rest)] for first, rest in zip(firsts, others, strict=True)]
        return [_pick_worst_rank(_check_readable(ranks), cluster) for ranks in answers]

    def find_estimate(self, candidate: Candidate, cluster: Cluster) -> Estimate | None:
        """Return the estimate of an earlier whole run; None if there was none, or it failed."""
        cards = _without_host(cluster)
        first = self._scheduler.find(run_of_fullest_rank(candidate, cards))
        if first is None:
            return None
        others = map(self._scheduler.find, runs_of_other_ranks(candidate, cards))
        ranks = [first.result(), *(other.result() for other in others if other is not None)]
        answer = _pick_worst_rank(ranks, cluster)
        return answer if isinstance(answer, Estimate) else None

    def find_failure(self, candidate: Candidate, cluster: Cluster) -> Failure | None:
        """Return why an earlier whole run of the fullest rank failed; None if it did not, or there was none."""
        first = self._scheduler.find(run_of_fullest_rank(candidate, cluster))
        answer = None if first is None else first.result()
        return answer if isinstance(answer, UsageError | CannotEstimate) else None

    def probe(self, candidates: Sequence[Candidate], cluster: Cluster) -> list[Need | Failure]:
        """Return what each candidate needs on a card where everything fits; deep networks by two shallow runs."""
        groups = [[self._scheduler.submit(run) for run in list_probes(one, cluster)] for one in candidates]
        return [
            self._combine_probes(candidate, cluster, [future.result() for future in group])
            for candidate, group in zip(candidates, groups, strict=True)
        ]

    def _combine_probes(self, candidate: Candidate, cluster: Cluster, answers: Sequence[Answer]) -> Need | Failure:
        if len(answers) > 1 and any(isinstance(answer, UnreadableModel) for answer in answers):
            whole_network = probe_of(candidate, cluster)  # perhaps only the shallow networks cannot be built
            answers = [self._scheduler.submit(whole_network).result()]
        return _need_from_probes(candidate, _check_readable(answers))

    def run_shown(self, candidates: Sequence[Candidate], cluster: Cluster) -> list[Estimate | None]:
        """Run each candidate as `tonnage estimate` runs it, so that a saved plan gives the same answer.

        None for one that takes too long, of which whole runs leave out micro-batches, or that fails now.  One whose
        seconds `tonnage estimate` takes from counted operations is always run: the search's seconds differ from them.
        """
        futures = [
            self._scheduler.submit(ShownRun(candidate, cluster))
            if is_quick(candidate, cluster) or needs_counting(Case(candidate.job, candidate.plan, cluster))
            else None
            for candidate in candidates
        ]
        answers = [None if future is None else future.result() for future in futures]
        return [answer if isinstance(answer, Estimate) else None for answer in answers]

    def _execute(self, run: Runnable) -> Answer:
        worker = self._idle.get()
        try:
            if self._has_ended:
                raise CannotEstimate("The search has ended.")
            if worker is None:
                worker = self._start_worker()
            return run.execute(worker)
        except GhostUnavailable:
            raise
        except (UsageError, CannotEstimate) as error:
            if worker is not None and worker.closed and not worker.answered:
                raise GhostUnavailable(str(error)) from error  # the next worker would end in the same way
            return error
        finally:
            self._idle.put(worker if worker is not None and not worker.closed else None)

    def _warm_worker(self) -> None:
        """Start a worker if there is none yet; if that fails, the first trial run raises the error."""
        worker = self._idle.get()
        try:
            if worker is None and not self._has_ended:
                worker = self._start_worker()
        except TonnageError:
            pass
        finally:
            self._idle.put(worker)

    def _start_worker(self) -> Worker:
        from tonnage.workers.worker import Worker

        worker = Worker(self._torch, self._progress, wait=False)
        self._workers.append(worker)
        if self._has_ended:  # meanwhile, and without this worker
            worker.kill()
        return worker

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        """End all workers at once, also those that still run something after an interruption."""
        self._has_ended = True
        self._scheduler.cancel()
        for worker in self._workers:
            worker.kill()
        self._scheduler.join()
        for worker in self._workers:
            worker.close()


def _is_within(answer: Answer, budget_bytes: int | None) -> bool:
    if not isinstance(answer, Estimate) or not answer.fits_card:
        return False
    return budget_bytes is None or answer.peak.process_bytes <= budget_bytes


def _without_host(cluster: Cluster) -> Cluster:
    """Return the cluster without a stated host memory, which changes no run: only the verdict on it."""
    return replace(cluster, host_memory_bytes=None)


def _pick_worst_rank(ranks: Sequence[Answer], cluster: Cluster) -> Estimate | Failure:
    """Return the estimate of the rank that needs most, with the others listed; or why one could not be run."""
    estimates = [answer for answer in ranks if isinstance(answer, Estimate)]
    for answer in ranks:
        if isinstance(answer, UsageError | CannotEstimate):
            return answer
    ordered = sorted(estimates, key=lambda estimate: (estimate.fits_card, -estimate.peak.process_bytes))
    return combine(ordered, cluster)


def _check_readable(answers: Sequence[Answer]) -> Sequence[Answer]:
    """Return the answers.  Raises UnreadableModel if one is that: every plan has the same network."""
    for answer in answers:
        if isinstance(answer, UnreadableModel):
            raise answer
    return answers


def _need_from_probes(candidate: Candidate, answers: Sequence[Answer]) -> Need | Failure:
    for answer in answers:
        if isinstance(answer, UsageError | CannotEstimate):
            return answer
    probes = [answer for answer in answers if isinstance(answer, Probe)]
    if len(probes) == 1:
        return need_of(probes[0])
    found = choose_probe_depths(candidate.job, candidate.plan)
    assert found is not None
    return extrapolate(probes[0], probes[1], found, layers_of(candidate.job))
