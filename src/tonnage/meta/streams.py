"""Streams and events of a card that is not there: work is done as soon as it is asked for, memory remembers where.

The caching allocator keeps the blocks of each stream apart, so what a program asks for while another stream is
current (FSDP2 gathers and reduces on streams of its own) comes from that stream's pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

DEFAULT: Final = 0
"""The stream on which a program begins, as the allocator's replica numbers it."""


_CUDA: Final = 1
"""The card's kind, as C++ numbers them (c10/core/DeviceType.h)."""


class Event:
    """A moment in a stream; it has always passed."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Like torch's, with whatever it is to measure."""

    def record(self, stream: Stream | None = None) -> None:
        """Everything before it is done already."""

    def wait(self, stream: Stream | None = None) -> None:
        """It has passed."""

    def synchronize(self) -> None:
        """It has passed."""

    def query(self) -> bool:
        """It has passed."""
        return True


class Stream:
    """A queue of work on the card; memory that is asked for while it is current is of its pool."""

    def __init__(self, device: torch.device, number: int) -> None:
        self.device = device
        self.number = self.stream_id = number
        """What the allocator knows it by."""
        self.device_index = device.index
        self.device_type = _CUDA

    def wait_event(self, event: Event) -> None:
        """It has passed."""

    def wait_stream(self, stream: Stream) -> None:
        """Its work is done."""

    def record_event(self, event: Event | None = None) -> Event:
        """A moment that has passed."""
        return event or Event()

    def synchronize(self) -> None:
        """Its work is done."""

    def query(self) -> bool:
        """Its work is done."""
        return True

    def is_capturing(self) -> bool:
        """No graph is made."""
        return False


class Streams:
    """The streams of one card, and which of them is current."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers = count(DEFAULT + 1)
        self._default = self.current = Stream(device, DEFAULT)

    def answers(self) -> dict[str, Any]:
        """What torch.cuda says of streams."""
        return {
            "Stream": self._new,
            "Event": Event,
            "stream": self._within,
            "set_stream": self._set,
            "current_stream": lambda device=None: self.current,
            "default_stream": lambda device=None: self._default,
        }

    def _new(self, *arguments: Any, **options: Any) -> Stream:
        return Stream(self._device, next(self._numbers))

    def _set(self, stream: Stream) -> None:
        self.current = stream

    @contextmanager
    def _within(self, stream: Stream | None) -> Iterator[None]:
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before
