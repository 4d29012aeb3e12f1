"""Runs side by side, in turn: what is asked before what may be asked next.

Whoever asks waits for few answers at a time, so that workers would stand idle meanwhile.  They run ahead instead what
is guessed to be asked next, in the order of the guess.  An answer does not depend on when it was found, so neither
does anything that is made of answers; what was guessed wrongly has cost idle time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Generic, Protocol, TypeVar


class Run(Protocol):
    """What can be run."""

    @property
    def key(self) -> Hashable:
        """What decides the answer."""


R = TypeVar("R", bound=Run)
A = TypeVar("A")


class Turns(Generic[R, A]):
    """Threads that take what is asked first, then what is guessed; nothing is run twice."""

    def __init__(self, count: int, answer: Callable[[R], A]) -> None:
        self._answer = answer
        self._threads = ThreadPoolExecutor(count)
        self._lock = Lock()
        self._known: dict[Hashable, Future[A]] = {}
        self._asked: deque[R] = deque()
        self._guessed: deque[R] = deque()
        self._keys: set[Hashable] = set()

    @property
    def count(self) -> int:
        """How many different runs were asked for, whatever was run ahead."""
        return len(self._keys)

    def ask(self, run: R) -> Future[A]:
        """The answer to come, which raises what running it raised."""
        key = run.key
        self._keys.add(key)
        with self._lock:
            if key not in self._known:
                self._known[key] = Future()
                self._asked.append(run)
                self._threads.submit(self._turn)
            return self._known[key]

    def asked(self, run: R) -> Future[A] | None:
        """The answer to what was asked before; None for what nobody asked, even if it was run ahead."""
        return self._known[run.key] if run.key in self._keys else None

    def done(self, run: R) -> A | None:
        """The answer to what was run, asked for or ahead; None where there is none yet."""
        future = self._known.get(run.key)
        return future.result() if future is not None and future.done() and future.exception() is None else None

    def guess(self, runs: Iterable[R]) -> None:
        """What to do while nothing is asked, the most likely first, in place of what was guessed before."""
        with self._lock:
            self._guessed = deque(runs)
            for _ in self._guessed:
                self._threads.submit(self._turn)

    def beside(self, call: Callable[[], None]) -> None:
        """Have a thread do something else, before what is asked from now on."""
        self._threads.submit(call)

    def end(self) -> None:
        """Begin nothing any more."""
        with self._lock:
            self._asked.clear()
            self._guessed.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Wait for what has begun."""
        self._threads.shutdown()

    def _turn(self) -> None:
        taken = self._next()
        if taken is None:
            return
        run, future = taken
        try:
            future.set_result(self._answer(run))
        except BaseException as error:  # whoever asks for it gets it
            future.set_exception(error)

    def _next(self) -> tuple[R, Future[A]] | None:
        with self._lock:
            if self._asked:
                run = self._asked.popleft()
                return run, self._known[run.key]
            while self._guessed:
                run = self._guessed.popleft()
                if run.key not in self._known:
                    future = self._known[run.key] = Future()
                    return run, future
        return None
