"""The threads by which transformers reads weights, by the clock of the machine that was measured.

From 5.0 on a pool of four copies weights to the card while the main thread quantizes them one by one, and each lies
there in fp16 from when its copying begins until it has been used.  On a ghost nothing is read: real threads would be
through with everything at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

import torch

THREADS: Final = 4
"""What transformers takes where there are four processors, as in Kaggle's machine of a T4."""
BYTES_PER_SECOND: Final = 2e9
"""Of all threads together, from a file in memory.  Not measured: a figure of the right size, taken first and kept.
Half and twice as much change three and six of 27 reserved peaks, by at most 1.8 %, and allocated by at most 0.6 %."""
USE_SECONDS: Final = 1.5e-3
"""To quantize one weight and put it into its module, as the above."""


class Readers:
    """Stands in for a `ThreadPoolExecutor`: reads begin in their order, when a thread is free by that clock."""

    def __init__(self, max_workers: int | None = None) -> None:
        self._free_seconds = [0.0] * THREADS
        self._waiting: deque[Read] = deque()
        self._now_seconds = 0.0

    def submit(self, job: Callable[[], torch.Tensor]) -> Read:
        """What will be read."""
        read = Read(job, self)
        self._waiting.append(read)
        self._begin()
        return read

    def use(self, read: Read) -> None:
        """Go on until `read` is there, and until it has been used."""
        while read.there_seconds is None:
            self._now_seconds = max(self._now_seconds, min(self._free_seconds))
            self._begin()
        self._now_seconds = max(self._now_seconds, read.there_seconds)
        self._begin()
        self._now_seconds += USE_SECONDS

    def _begin(self) -> None:
        """All reads for which a thread is free by now."""
        while self._waiting and min(self._free_seconds) <= self._now_seconds:
            thread = self._free_seconds.index(min(self._free_seconds))
            self._free_seconds[thread] = self._waiting.popleft().begin(self._free_seconds[thread])

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        """Nothing runs."""


class Read(Future[Any]):
    """One weight that is on its way."""

    def __init__(self, job: Callable[[], torch.Tensor], readers: Readers) -> None:
        super().__init__()
        self._job, self._readers = job, readers
        self._value: torch.Tensor | None = None
        self.there_seconds: float | None = None

    def begin(self, now_seconds: float) -> float:
        """Take the memory; when it will have been read."""
        self._value = self._job()
        self.there_seconds = now_seconds + self._value.nbytes * THREADS / BYTES_PER_SECOND
        return self.there_seconds

    def result(self, timeout: float | None = None) -> Any:
        """The weight, which nothing here holds any longer."""
        self._readers.use(self)
        value, self._value = self._value, None
        return value
