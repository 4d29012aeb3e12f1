"""A card's memory as torch's caching allocator would hand it out, for the Recorder of the portable source."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

from tonnage.allocator import AllocatorSettings, CachingAllocator, Driver, OutOfMemory, Shortage
from tonnage.catalog.overheads import overheads
from tonnage.meta.recording import DoesNotFit
from tonnage.recorder.tonnage_recorder.layout import ACTIONS, EVENT_COLUMNS
from tonnage.units import GIB, KIB, MIB

if TYPE_CHECKING:
    from tonnage.cluster import Cluster
    from tonnage.trace.communicators import Communicators

_CODES = {name: code for code, name in enumerate(ACTIONS)}


class CardMemory:
    """The replica of the allocator (`tonnage.allocator`) on a card of which the CUDA context and NCCL have a part."""

    def __init__(
        self, cluster: Cluster, settings: AllocatorSettings, torch_version: str, stream: Callable[[], int]
    ) -> None:
        device = cluster.device
        self._stream = stream
        self._cluster = cluster
        self._nccl_bytes = 0
        self.capacity_bytes = device.capacity_bytes
        self._driver = Driver(device.capacity_bytes, taken_bytes=device.context_bytes)
        self._allocator = CachingAllocator(self._driver, settings, torch_version=torch_version)

    @property
    def peak_allocated_bytes(self) -> int:
        """The most that was handed out at once: rounded, and with what was not worth splitting off."""
        return self._allocator.peak_allocated_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """The most that was held from the driver at once."""
        return self._allocator.peak_reserved_bytes

    @property
    def retries(self) -> int:
        """How often cached memory was given back to serve a request."""
        return self._allocator.counters["num_alloc_retries"]

    def allocate(self, size_bytes: int, mark: int) -> int:
        """A block as torch's allocator chooses it.  Raises DoesNotFit."""
        self._allocator.mark = mark
        try:
            return self._allocator.malloc(size_bytes, self._stream())
        except OutOfMemory as error:
            raise DoesNotFit(_in_torchs_words(error.shortage)) from None

    def free(self, address: int, size_bytes: int, mark: int) -> None:
        """Give a block back to the allocator, which keeps it."""
        self._allocator.mark = mark
        self._allocator.free(address)

    def connect(self, used: Communicators) -> None:
        """Take what NCCL takes for these, of which it knows nothing that the allocator could give back.

        Raises DoesNotFit.
        """
        device, per_node = self._cluster.device, self._cluster.gpus_per_node
        taken = overheads(device, used.sizes, gpus_per_node=per_node, send_recv_peers=used.peers).nccl_bytes
        if not self._driver.create(taken - self._nccl_bytes):
            raise DoesNotFit("NCCL error: unhandled cuda error; Cuda failure 2 'out of memory'")
        self._nccl_bytes = taken

    def columns(self) -> dict[str, array[int]]:
        """All of the allocator's events."""
        columns = {name: array("q") for name in EVENT_COLUMNS}
        for event in self._allocator.events:
            for name, value in zip(EVENT_COLUMNS, (_CODES[event.action], *event[1:]), strict=True):
                columns[name].append(value)
        return columns


def _in_torchs_words(shortage: Shortage) -> str:
    """The beginning of the message of torch's own error."""
    unallocated = shortage.reserved_bytes - shortage.allocated_bytes
    return (
        f"CUDA out of memory. Tried to allocate {_size(shortage.segment_bytes)}. GPU 0 has a total capacity of "
        f"{_size(shortage.total_bytes)} of which {_size(shortage.free_bytes)} is free. Of the allocated memory "
        f"{_size(shortage.allocated_bytes)} is allocated by PyTorch, and {_size(unallocated)} is reserved by PyTorch "
        "but unallocated."
    )


def _size(count_bytes: int) -> str:
    """As torch's allocator writes it: 192.00 MiB."""
    for unit, width in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count_bytes > width:
            return f"{count_bytes / width:.2f} {unit}"
    return f"{count_bytes} bytes"
