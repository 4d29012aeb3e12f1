"""Run tasks side by side on a few threads, each distinct task once.

    scheduler = Scheduler(2, execute)
    futures = [scheduler.submit(task) for task in tasks]
    answers = [future.result() for future in futures]

Only one thread submits, so the order in which tasks are asked for is the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar


class Task(Protocol):
    """Something to execute."""

    @property
    def key(self) -> Hashable:
        """Return what decides the answer: tasks with equal keys are executed once."""


T = TypeVar("T", bound=Task)
A = TypeVar("A")


class Scheduler(Generic[T, A]):
    """A pool of threads that remembers every answer."""

    def __init__(self, thread_count: int, execute: Callable[[T], A]) -> None:
        self._execute = execute
        self._threads = ThreadPoolExecutor(thread_count)
        self._futures: dict[Hashable, Future[A]] = {}

    @property
    def task_count(self) -> int:
        """Return how many different tasks were submitted."""
        return len(self._futures)

    def submit(self, task: T) -> Future[A]:
        """Return the task's future answer, which raises what executing it raises."""
        key = task.key
        if key not in self._futures:
            self._futures[key] = self._threads.submit(self._execute, task)
        return self._futures[key]

    def find(self, task: T) -> Future[A] | None:
        """Return the answer of a task that was submitted before; None for any other."""
        return self._futures.get(task.key)

    def call(self, function: Callable[[], None]) -> None:
        """Have a thread call a function, before the tasks that are submitted later."""
        self._threads.submit(function)

    def cancel(self) -> None:
        """Start no further task."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Wait for the tasks that have started."""
        self._threads.shutdown()
