"""What candidates need, run on ghosts: several warm workers side by side, each answer kept for the search."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

from tonnage.case import Case
from tonnage.cluster import Cluster
from tonnage.errors import CannotEstimate, GhostUnavailable, TonnageError, UnreadableModel, UsageError
from tonnage.estimates import predict
from tonnage.estimates.estimate import Estimate
from tonnage.ghost.process import any_libraries
from tonnage.ghost.scratch import scratch
from tonnage.job import Job
from tonnage.mesh import axes
from tonnage.planner.solution import Candidate
from tonnage.search import waiting
from tonnage.search.bounds import usually_of_the_first
from tonnage.search.depth import Look, Need, extrapolated, of_run, seen
from tonnage.search.pricing import shape_of
from tonnage.search.turns import Turns
from tonnage.shallow.few import depths, is_repetitive, layers_of, leaves_what_it_found, roomy, with_layers
from tonnage.timing.work import Work
from tonnage.trace.operations import Worked

if TYPE_CHECKING:
    from tonnage.ghost.pool import Worker

STEPS: Final = 3
"""Of a plan that is shown: the first makes optimizer states, the second holds them, the third is as all others.

The others do what the first did, so that they are its requests once more (`tonnage_inside.repeating`), except where a
step follows from those before it."""

STEPS_EXPANDABLE: Final = 2
"""The same where segments expand and the second step leaves behind what it found, so that the third is like it."""

LOOKS: Final = 1
"""Steps of a run that only compares: `depth.seen` tells what the later ones need."""

MICRO_BATCHES: Final = 2
"""Of a step: gradients are made in the first and added to in the second, as in all others.

A pipeline gets one more than it has stages, so that its first stage holds as many at once as it ever does, an
interleaved one two rounds of its ranks; what it holds for all of a step from the beginning is added (`waiting`)."""

Failure: TypeAlias = UsageError | CannotEstimate
"""Why a candidate could not be run."""

Ask: TypeAlias = tuple[Candidate, Cluster | None]
"""A candidate to be run whole on this cluster, or without one to be looked at."""

Answer: TypeAlias = Estimate | Look | Worked | Failure
"""Of one run."""


class Ghosts:
    """Workers that run candidates of one cluster.  Use it as a context manager.

    An answer is an Estimate or a Need, or the error with which the job could not be run.  Raises GhostUnavailable and
    UnreadableModel, by which no other plan would run either.
    """

    def __init__(self, progress: Callable[[str], None], count: int | None = None, torch: str | None = None) -> None:
        any_libraries()
        self._progress, self._torch = progress, torch
        self._count = count or max(1, min(4, os.cpu_count() or 1))
        self._idle: SimpleQueue[Worker | None] = SimpleQueue()
        self._workers: list[Worker] = []
        self._held = ExitStack()
        self._decided = self._held.enter_context(scratch("tonnage-")) / "decided"
        self._turns: Turns[_Run, Answer] = Turns(self._count, self._run)
        self._ended = False
        for _ in range(self._count):
            self._idle.put(None)

    @property
    def runs(self) -> int:
        """Ranks of candidates that were asked for, each run or taken from the shelf."""
        return self._turns.count

    @property
    def count(self) -> int:
        """How many run at once."""
        return self._count

    def start(self) -> None:
        """Let workers begin to import their libraries, for which the first runs would wait."""
        for _ in range(self._count):
            self._turns.beside(self._warm)

    def fit(
        self, candidates: Sequence[Candidate], cluster: Cluster, budget_bytes: int | None = None
    ) -> list[Estimate | Failure]:
        """Each on a card of the cluster, whole; not fitting is an answer.

        Of ranks that differ the one that is likely to need most comes first; where it needs more than `budget_bytes`
        (default: the card), the others are not asked.
        """
        firsts = [self._turns.ask(_first(one, cluster)) for one in candidates]
        others: list[list[Future[Answer]]] = []
        for one, first in zip(candidates, firsts, strict=True):
            within = _is_within(first.result(), budget_bytes)
            others.append([self._turns.ask(run) for run in _others(one, cluster)] if within else [])
        answers = [[each.result() for each in (first, *rest)] for first, rest in zip(firsts, others, strict=True)]
        return [_worst(_of_readable(ranks)) for ranks in answers]

    def made(self, candidate: Candidate, cluster: Cluster) -> Estimate | None:
        """What a candidate needed that was run whole before; None for one that was not, or could not be."""
        first = self._turns.asked(_first(candidate, cluster))
        if first is None:
            return None
        others = map(self._turns.asked, _others(candidate, cluster))
        answer = _worst([first.result(), *(other.result() for other in others if other is not None)])
        return answer if isinstance(answer, Estimate) else None

    def made_ahead(self, candidate: Candidate, cluster: Cluster) -> Answer | None:
        """What is known already of a candidate's likely fullest rank, whole, though nobody may have asked for it."""
        return self._turns.done(_first(candidate, cluster))

    def need(self, candidates: Sequence[Candidate], cluster: Cluster) -> list[Need | Failure]:
        """What each needs, on a card where everything fits; of deep networks by two runs of a few layers."""
        groups = [[self._turns.ask(run) for run in _looks(one, cluster)] for one in candidates]
        return [
            self._of_looks(one, cluster, [each.result() for each in group])
            for one, group in zip(candidates, groups, strict=True)
        ]

    def _of_looks(self, candidate: Candidate, cluster: Cluster, answers: Sequence[Answer]) -> Need | Failure:
        if len(answers) > 1 and any(isinstance(answer, UnreadableModel) for answer in answers):
            answers = [self._turns.ask(_look(candidate, cluster)).result()]  # it may be the cut that does not fit
        return _needed(candidate, _of_readable(answers))

    def worked(self, candidate: Candidate, cluster: Cluster) -> Worked | None:
        """What the operations of a step of its likely fullest rank work; None where it could not be counted."""
        rank = _likely_fullest(candidate, cluster)
        answer = self._turns.ask(_Run(candidate, cluster, 2, 0, rank, looks=False, counts=True)).result()
        return answer if isinstance(answer, Worked) else None

    def ahead(self, asks: Sequence[Ask], cluster: Cluster) -> None:
        """Say what is likely to be asked next, in place of what was said before: idle workers run it meanwhile.

        Of what is to be run whole the rank that is likely to need most has its turn, and the others come last of all.
        It changes no answer.
        """
        turns = [run for one, on in asks for run in ([_first(one, on)] if on else _looks(one, cluster))]
        rest = [run for one, on in asks if on for run in _others(one, on)]
        self._turns.guess([*turns, *rest])

    def _run(self, wanted: _Run) -> Answer:
        worker = self._idle.get()
        try:
            if self._ended:
                raise CannotEstimate("The search has ended.")
            if worker is None:
                worker = self._start()
            return wanted.on(worker)
        except GhostUnavailable:
            raise
        except (UsageError, CannotEstimate) as error:
            if worker is not None and worker.closed and not worker.answered:
                raise GhostUnavailable(str(error)) from error  # so would the next one
            return error
        finally:
            self._idle.put(worker if worker is not None and not worker.closed else None)

    def _warm(self) -> None:
        """Start one that is not there yet; who asks first hears why it cannot be."""
        worker = self._idle.get()
        try:
            if worker is None and not self._ended:
                worker = self._start()
        except TonnageError:
            pass
        finally:
            self._idle.put(worker)

    def _start(self) -> Worker:
        from tonnage.ghost.pool import Worker

        worker = Worker(self._torch, self._progress, wait=False, decided=self._decided)
        self._workers.append(worker)
        if self._ended:  # meanwhile, without having seen this one
            worker.kill()
        return worker

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        """End all at once, also what is at work ahead, or for somebody who was interrupted."""
        self._ended = True
        self._turns.end()
        for worker in self._workers:
            worker.kill()
        self._turns.join()
        for worker in self._workers:
            worker.close()
        self._held.close()


@dataclass(frozen=True)
class _Run:
    """One rank of a candidate, to be run."""

    candidate: Candidate
    cluster: Cluster
    steps: int
    repeated: int
    """Steps more that are the first one's requests alone."""
    rank: int
    looks: bool
    """Whether only what it needs is asked for."""
    counts: bool = False
    """Whether what the operations of a step work is asked for, in place of memory."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What decides the answer; a model's configuration, which cannot be hashed, as it is written."""
        job = self.candidate.job
        shape = tuple(getattr(job, item.name) for item in fields(job) if item.name != "model")
        rest = (self.candidate.plan, self.cluster, self.steps, self.repeated, self.rank, self.looks, self.counts)
        return (job.model.name, repr(job.model.config), *shape, *rest)

    def on(self, worker: Worker) -> Estimate | Look | Worked:
        """The answer, with what the rank holds for the micro-batches that are not run."""
        asked, plan = self.candidate.job, self.candidate.plan
        if self.counts:
            return worker.worked(asked, plan, self.cluster, rank=self.rank)
        job = replace(asked, grad_accum=micro_batches_run(self.candidate))
        each = waiting.waiting_bytes(self.candidate, self.cluster, self.rank)
        more = (asked.grad_accum - job.grad_accum) * each
        if self.looks:
            trace = predict.trace(Case(job, plan, self.cluster), rank=self.rank, steps=self.steps, worker=worker)
            return waiting.looked(seen(trace, self.cluster, by_module=plan.pp == 1), more)
        found = predict.estimate(
            Case(job, plan, self.cluster),
            steps=self.steps,
            repeated=self.repeated,
            few_layers=True,
            rank=self.rank,
            worker=worker,
        )
        return _said_of(waiting.estimated(found.estimate, more, asked, self.cluster), asked, job)


def _first(candidate: Candidate, cluster: Cluster) -> _Run:
    """The rank that is likely to need most, whole."""
    return _whole(candidate, cluster, _likely_fullest(candidate, cluster))


def _others(candidate: Candidate, cluster: Cluster) -> list[_Run]:
    """The other ranks, whole."""
    first = _likely_fullest(candidate, cluster)
    return [_whole(candidate, cluster, rank) for rank in _ranks(candidate, cluster) if rank != first]


def _whole(candidate: Candidate, cluster: Cluster, rank: int) -> _Run:
    return _Run(candidate, cluster, *steps_run(candidate), rank, looks=False)


def _looks(candidate: Candidate, cluster: Cluster) -> list[_Run]:
    """The runs that tell what a candidate needs: of itself, or of two shallower ones."""
    found = depths(candidate.job, candidate.plan)
    few = [replace(candidate, job=with_layers(candidate.job, layers)) for layers in found or ()]
    return [_look(candidate, cluster, one) for one in few or [candidate]]


def _look(candidate: Candidate, cluster: Cluster, shallower: Candidate | None = None) -> _Run:
    """One that only compares, of a candidate or, in its place, of a shallower one."""
    rank, one = _likely_fullest(candidate, cluster), shallower or candidate
    return _Run(one, roomy(cluster), _look_steps(one), 0, rank, looks=True)


def _ranks(candidate: Candidate, cluster: Cluster) -> tuple[int, ...]:
    """Those that may need most; of a plan that cannot be laid out the first, which will say so."""
    try:
        return axes(candidate.plan, cluster.gpus, cluster.gpus_per_node).different
    except UsageError:
        return (0,)


def _likely_fullest(candidate: Candidate, cluster: Cluster) -> int:
    """Of a pipeline the first rank, which has the embedding and most micro-batches under way, or the second, which
    gets more of all of a step's."""
    first, *others = _ranks(candidate, cluster)
    shape = shape_of(candidate)
    if not others or shape is None:
        return first
    more = waiting.waiting_bytes(candidate, cluster, others[0]) - waiting.waiting_bytes(candidate, cluster, first)
    work = Work.of(candidate.job, candidate.plan, cluster)
    return others[0] if candidate.job.grad_accum * more > usually_of_the_first(shape, work) else first


def _is_within(answer: Answer, budget_bytes: int | None) -> bool:
    if not isinstance(answer, Estimate) or not answer.fits:
        return False
    return budget_bytes is None or answer.peak.process_bytes <= budget_bytes


def _worst(ranks: Sequence[Answer]) -> Estimate | Failure:
    """The rank that needs most, with the others listed; or why one could not be run."""
    estimates = [one for one in ranks if isinstance(one, Estimate)]
    for one in ranks:
        if isinstance(one, UsageError | CannotEstimate):
            return one
    worst = max(estimates, key=lambda one: (not one.fits, one.peak.process_bytes))
    listed = sorted((each for one in estimates for each in one.ranks), key=lambda each: each["rank"])
    return replace(worst, ranks=tuple(listed))


def micro_batches_run(candidate: Candidate) -> int:
    """Micro-batches of a step after which nothing new happens."""
    job, plan = candidate.job, candidate.plan
    if plan.pp > 1 and plan.pp_schedule == "interleaved":
        return min(job.grad_accum, 2 * plan.pp)
    return min(job.grad_accum, MICRO_BATCHES if plan.pp == 1 else plan.pp + 1)


def steps_run(candidate: Candidate) -> tuple[int, int]:
    """Of a plan that is shown, how many steps are made, and how many more are the first one's requests again."""
    job, plan = candidate.job, candidate.plan
    steps = STEPS_EXPANDABLE if plan.allocator == "expandable" and leaves_what_it_found(job, plan) else STEPS
    return (1, steps - 1) if is_repetitive(job, plan) else (steps, 0)


def _look_steps(candidate: Candidate) -> int:
    """A budget acts from the second micro-batch on."""
    return LOOKS + 1 if candidate.plan.checkpointing.startswith("budget") else LOOKS


def _said_of(found: Estimate, asked: Job, run: Job) -> Estimate:
    """The estimate as of the whole step, saying what of it was run."""
    if asked.grad_accum == run.grad_accum:
        return found
    words = f"{run.grad_accum} of {asked.grad_accum} micro-batches of a step were run: the others are like the last"
    coverage = replace(found.coverage, run=(*found.coverage.run, words))
    return replace(found, job={**found.job, "grad_accum": asked.grad_accum}, coverage=coverage)


def _of_readable(answers: Sequence[Answer]) -> Sequence[Answer]:
    """The answers.  Raises UnreadableModel where one is that: no other plan has another network."""
    for answer in answers:
        if isinstance(answer, UnreadableModel):
            raise answer
    return answers


def _needed(candidate: Candidate, answers: Sequence[Answer]) -> Need | Failure:
    for answer in answers:
        if isinstance(answer, UsageError | CannotEstimate):
            return answer
    runs = [answer for answer in answers if isinstance(answer, Look)]
    if len(runs) == 1:
        return of_run(runs[0])
    found = depths(candidate.job, candidate.plan)
    assert found is not None
    return extrapolated(runs[0], runs[1], found, layers_of(candidate.job))
