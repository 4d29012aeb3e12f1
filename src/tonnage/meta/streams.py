"""Streams and events of a GPU that is not there: work is done at once, and memory belongs to the current stream's
pool.

The caching allocator keeps the blocks of each stream apart, so memory that a program requests while another stream is
current (FSDP2 gathers and reduces on its own streams) comes from that stream's pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

DEFAULT: Final = 0
"""Number of the stream on which a program begins, in the allocator's replica."""


_CUDA: Final = 1
"""The GPU's device type in C++ (c10/core/DeviceType.h)."""


class Event:
    """A moment in a stream; it has always passed."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Accept torch's arguments."""

    def record(self, stream: Stream | None = None) -> None:
        """Do nothing: everything before it is done."""

    def wait(self, stream: Stream | None = None) -> None:
        """Do nothing: it has passed."""

    def synchronize(self) -> None:
        """Do nothing: it has passed."""

    def query(self) -> bool:
        """Return True: it has passed."""
        return True


class Stream:
    """A queue of work on the GPU; memory that is requested while it is current belongs to its pool."""

    def __init__(self, device: torch.device, number: int) -> None:
        self.device = device
        self.number = self.stream_id = number
        """Number of the stream for the allocator."""
        self.device_index = device.index
        self.device_type = _CUDA

    def wait_event(self, event: Event) -> None:
        """Do nothing: it has passed."""

    def wait_stream(self, stream: Stream) -> None:
        """Do nothing: its work is done."""

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event that has passed."""
        return event or Event()

    def synchronize(self) -> None:
        """Do nothing: its work is done."""

    def query(self) -> bool:
        """Return True: its work is done."""
        return True

    def is_capturing(self) -> bool:
        """Return False: no graph is captured."""
        return False


class Streams:
    """The streams of one GPU, and which of them is current."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers = count(DEFAULT + 1)
        self._default = self.current = Stream(device, DEFAULT)

    def answers(self) -> dict[str, Any]:
        """Return torch.cuda's functions for streams."""
        return {
            "Stream": self._new_stream,
            "Event": Event,
            "stream": self._make_current,
            "set_stream": self._set_current,
            "current_stream": lambda device=None: self.current,
            "default_stream": lambda device=None: self._default,
        }

    def _new_stream(self, *arguments: Any, **options: Any) -> Stream:
        return Stream(self._device, next(self._numbers))

    def _set_current(self, stream: Stream) -> None:
        self.current = stream

    @contextmanager
    def _make_current(self, stream: Stream | None) -> Iterator[None]:
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before
