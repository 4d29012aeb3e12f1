"""What candidates need, run on ghosts: several warm workers side by side, each answer kept for the search."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from tonnage import predict
from tonnage.device import Cluster
from tonnage.errors import CannotEstimate, UsageError
from tonnage.estimates import Estimate
from tonnage.solution import Candidate

if TYPE_CHECKING:
    from tonnage.ghost.pool import Worker

ENOUGH_BYTES: Final = 2**40
"""1 TiB: a card on which nearly everything fits, so that a peak can be named.  Expandable segments reserve addresses
for a whole card each, and there are only so many addresses."""

STEPS: Final = 3
"""The first makes optimizer states, the second holds them, the third is as all that follow."""


Answer: TypeAlias = Estimate | UsageError | CannotEstimate
"""What a run says, or why there was none."""


class Ghosts:
    """Workers that run candidates of one cluster.  Use it as a context manager.

    An answer is an Estimate, or the error with which the job could not be run.  Raises GhostUnavailable.
    """

    def __init__(self, progress: Callable[[str], None], count: int | None = None, torch: str | None = None) -> None:
        self._progress, self._torch = progress, torch
        self._count = count or max(1, min(4, os.cpu_count() or 1))
        self._idle: SimpleQueue[Worker | None] = SimpleQueue()
        self._workers: list[Worker] = []
        self._threads = ThreadPoolExecutor(self._count)
        self._known: dict[tuple[Any, ...], Answer] = {}
        self.runs = 0
        """Candidates that were run or taken from the shelf."""
        for _ in range(self._count):
            self._idle.put(None)

    @property
    def count(self) -> int:
        """How many run at once."""
        return self._count

    def fit(self, candidates: Sequence[Candidate], cluster: Cluster) -> list[Answer]:
        """Each on a card of the cluster; not fitting is an answer."""
        wanted = {_key(one, cluster): one for one in candidates}
        missing = {key: one for key, one in wanted.items() if key not in self._known}
        answers = self._threads.map(lambda one: self._run(one, cluster), missing.values())
        self._known |= dict(zip(missing, answers, strict=True))
        return [self._known[key] for key in wanted]

    def need(self, candidates: Sequence[Candidate], cluster: Cluster) -> list[Answer]:
        """Each on a card where everything fits, so that its whole need is seen."""
        return self.fit(candidates, roomy(cluster))

    def _run(self, candidate: Candidate, cluster: Cluster) -> Answer:
        worker = self._idle.get()
        try:
            if worker is None:
                worker = self._start()
            self.runs += 1
            return predict.estimate(candidate.job, candidate.plan, cluster, steps=STEPS, worker=worker).estimate
        except (UsageError, CannotEstimate) as error:
            return error
        finally:
            self._idle.put(worker if worker is not None and not worker.closed else None)

    def _start(self) -> Worker:
        from tonnage.ghost.pool import Worker

        worker = Worker(self._torch, self._progress)
        self._workers.append(worker)
        return worker

    def __enter__(self) -> Ghosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()


def roomy(cluster: Cluster) -> Cluster:
    """The same machines with cards on which everything fits."""
    return replace(cluster, device=cluster.device.with_capacity(ENOUGH_BYTES))


def _key(candidate: Candidate, cluster: Cluster) -> tuple[Any, ...]:
    """What decides the answer; a model's configuration, which cannot be hashed, by its name and depth."""
    job = candidate.job
    shape = tuple(getattr(job, item.name) for item in fields(job) if item.name != "model")
    return (job.model.name, repr(job.model.config), *shape, candidate.plan, cluster)
