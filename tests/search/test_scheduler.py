"""What is asked has its turn before what is guessed; nothing is run twice, and nothing begins after the end."""

import threading
from dataclasses import dataclass

import pytest

from tonnage.search.scheduler import Turns


@dataclass(frozen=True)
class Run:
    key: str


class Worker:
    """Notes what it runs; the run named `first` waits until it may go on."""

    def __init__(self):
        self.ran, self.begun, self.may_go_on = [], threading.Event(), threading.Event()

    def __call__(self, run):
        self.ran.append(run.key)
        if run.key == "first":
            self.begun.set()
            assert self.may_go_on.wait(10)
        if run.key == "wrong":
            raise ValueError("no")
        return run.key.upper()


@pytest.fixture
def worker():
    return Worker()


@pytest.fixture
def turns(worker):
    """One thread, busy with the run named `first`."""
    made = Turns(1, worker)
    made.ask(Run("first"))
    assert worker.begun.wait(10)
    yield made
    worker.may_go_on.set()
    made.end()
    made.join()


def test_asked_before_guessed(turns, worker):
    turns.guess([Run("a"), Run("b")])
    asked = [turns.ask(Run("c")), turns.ask(Run("b"))]
    worker.may_go_on.set()
    assert [each.result(10) for each in asked] == ["C", "B"]
    assert turns.ask(Run("a")).result(10) == "A"
    assert worker.ran == ["first", "c", "b", "a"]


def test_a_guess_replaces_the_one_before(turns, worker):
    turns.guess([Run("a"), Run("b")])
    turns.guess([Run("b"), Run("c")])
    worker.may_go_on.set()
    assert turns.ask(Run("d")).result(10) == "D"
    assert turns.ask(Run("c")).result(10) == "C"
    assert "a" not in worker.ran
    assert len(worker.ran) == len(set(worker.ran))


def test_only_what_is_asked_is_counted(turns, worker):
    turns.guess([Run("a"), Run("b")])
    worker.may_go_on.set()
    for _ in range(2):
        turns.ask(Run("a")).result(10)
    assert turns.count == 2


def test_an_error_is_for_who_asks(turns, worker):
    turns.guess([Run("wrong"), Run("a")])
    worker.may_go_on.set()
    assert turns.ask(Run("b")).result(10) == "B"
    with pytest.raises(ValueError, match="no"):
        turns.ask(Run("wrong")).result(10)
    assert turns.ask(Run("a")).result(10) == "A"


def test_nothing_begins_after_the_end(turns, worker):
    turns.guess([Run("a")])
    turns.ask(Run("b"))
    turns.end()
    worker.may_go_on.set()
    turns.join()
    assert worker.ran == ["first"]


def test_what_is_done_is_known_to_whoever_does_not_ask(turns, worker):
    turns.guess([Run("a"), Run("wrong")])
    assert turns.done(Run("a")) is None
    worker.may_go_on.set()
    turns.ask(Run("last")).result(10)
    with pytest.raises(ValueError, match="no"):
        turns.ask(Run("wrong")).result(10)
    assert turns.done(Run("a")) in ("A", None)
    assert turns.ask(Run("a")).result(10) == turns.done(Run("a")) == "A"
    assert turns.done(Run("wrong")) is None
    assert turns.done(Run("never")) is None
