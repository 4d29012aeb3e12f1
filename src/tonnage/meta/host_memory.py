"""Memory of a Recorder's device: its interface, and the host's, whose blocks are neither rounded nor cached."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, Protocol

from tonnage.recorder.tonnage_recorder.record_layout import ACTIONS, EVENT_COLUMNS

if TYPE_CHECKING:
    from tonnage.trace.communicators import Communicators


_ALLOCATED: Final = ("segment_alloc", "alloc")


_FREED: Final = ("free_requested", "free_completed", "segment_free")


_CODES: Final = {name: code for code, name in enumerate(ACTIONS)}


_LINE_BYTES: Final = 64
"""Addresses are multiples of this, as those of torch's CPU allocator."""


class Memory(Protocol):
    """The memory of a Recorder's device: allocates and frees blocks, and keeps their events."""

    capacity_bytes: int
    """Bytes of the device."""

    @property
    def peak_allocated_bytes(self) -> int:
        """Return the most bytes allocated at once."""

    @property
    def peak_reserved_bytes(self) -> int:
        """Return the most bytes held from the system at once."""

    @property
    def retries(self) -> int:
        """Return how often cached memory was freed to serve a request."""

    def allocate(self, size_bytes: int, mark: int) -> int:
        """Return the address of a new block of at least one byte.  Raises DoesNotFit."""

    def free(self, address: int, size_bytes: int, mark: int) -> None:
        """Free a block."""

    def connect(self, used: Communicators) -> None:
        """Take the memory that NCCL takes for these communicators.  Raises DoesNotFit."""

    def columns(self) -> dict[str, array[int]]:
        """Return all events so far, as a Trace has them."""


class DoesNotFit(Exception):
    """A request that does not fit the device; the message is that of torch's own error."""


class HostMemory:
    """The system's memory: each block is a segment of its own, neither rounded nor cached."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.live_bytes = self.peak_allocated_bytes = 0
        self.retries = 0
        self._columns: dict[str, array[int]] = {name: array("q") for name in EVENT_COLUMNS}
        self._next_address = _LINE_BYTES

    @property
    def peak_reserved_bytes(self) -> int:
        """Return the allocated bytes, which are all that is held."""
        return self.peak_allocated_bytes

    def allocate(self, size_bytes: int, mark: int) -> int:
        """Return memory right behind the last block.  Raises DoesNotFit."""
        if self.live_bytes + size_bytes > self.capacity_bytes:
            self._record("oom", 0, size_bytes, mark)
            raise DoesNotFit(
                f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {size_bytes} bytes; "
                f"{self.live_bytes} of {self.capacity_bytes} are in use."
            )
        address = self._next_address
        self._next_address += -(-size_bytes // _LINE_BYTES) * _LINE_BYTES
        for action in _ALLOCATED:
            self._record(action, address, size_bytes, mark)
        self.live_bytes += size_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.live_bytes)
        return address

    def free(self, address: int, size_bytes: int, mark: int) -> None:
        """Return the block to the system at once."""
        for action in _FREED:
            self._record(action, address, size_bytes, mark)
        self.live_bytes -= size_bytes

    def connect(self, used: Communicators) -> None:
        """Take nothing: ranks on the host exchange without NCCL."""

    def columns(self) -> dict[str, array[int]]:
        """Return a copy of the events."""
        return {name: column[:] for name, column in self._columns.items()}

    def _record(self, action: str, address: int, size_bytes: int, mark: int) -> None:
        for name, value in zip(EVENT_COLUMNS, (_CODES[action], address, size_bytes, 0, mark), strict=True):
            self._columns[name].append(value)
