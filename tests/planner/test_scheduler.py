"""Tasks run side by side, each once; errors go to whoever asks; nothing starts after the end."""

import threading
from dataclasses import dataclass

import pytest

from tonnage.planner.scheduler import Scheduler


@dataclass(frozen=True)
class Task:
    key: str


class Worker:
    """Records what it executes; the task named `first` waits until it may go on."""

    def __init__(self):
        self.executed, self.started, self.may_go_on = [], threading.Event(), threading.Event()

    def __call__(self, task):
        self.executed.append(task.key)
        if task.key == "first":
            self.started.set()
            assert self.may_go_on.wait(10)
        if task.key == "wrong":
            raise ValueError("no")
        return task.key.upper()


@pytest.fixture
def worker():
    return Worker()


@pytest.fixture
def scheduler(worker):
    """One thread, busy with the task named `first`."""
    made = Scheduler(1, worker)
    made.submit(Task("first"))
    assert worker.started.wait(10)
    yield made
    worker.may_go_on.set()
    made.cancel()
    made.join()


def test_equal_tasks_are_executed_once(scheduler, worker):
    futures = [scheduler.submit(Task(key)) for key in ("b", "a", "b")]
    worker.may_go_on.set()
    assert [future.result(10) for future in futures] == ["B", "A", "B"]
    assert worker.executed == ["first", "b", "a"]
    assert scheduler.task_count == 3


def test_only_submitted_tasks_are_found(scheduler, worker):
    worker.may_go_on.set()
    scheduler.submit(Task("a"))
    assert scheduler.find(Task("a")).result(10) == "A"
    assert scheduler.find(Task("b")) is None
    assert scheduler.task_count == 2


def test_functions_are_called_before_later_tasks(scheduler, worker):
    scheduler.call(lambda: worker.executed.append("call"))
    future = scheduler.submit(Task("a"))
    worker.may_go_on.set()
    assert future.result(10) == "A"
    assert worker.executed == ["first", "call", "a"]


def test_errors_are_raised_by_the_future(scheduler, worker):
    wrong, right = scheduler.submit(Task("wrong")), scheduler.submit(Task("a"))
    worker.may_go_on.set()
    assert right.result(10) == "A"
    with pytest.raises(ValueError, match="no"):
        wrong.result(10)


def test_two_threads_execute_side_by_side():
    barrier = threading.Barrier(2)
    scheduler = Scheduler(2, lambda task: barrier.wait(10))
    futures = [scheduler.submit(Task(key)) for key in ("a", "b")]
    assert sorted(future.result(10) for future in futures) == [0, 1]
    scheduler.join()


def test_nothing_starts_after_the_end(scheduler, worker):
    scheduler.submit(Task("a"))
    scheduler.cancel()
    worker.may_go_on.set()
    scheduler.join()
    assert worker.executed == ["first"]
