"""A GPU's memory as torch's caching allocator manages it, for the Recorder."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

from tonnage.allocator import AllocatorSettings, CachingAllocator, Driver, OutOfMemory, Shortage
from tonnage.catalog.overheads import overheads
from tonnage.meta.host_memory import DoesNotFit
from tonnage.recorder.tonnage_recorder.record_layout import ACTIONS, EVENT_COLUMNS
from tonnage.units import GIB, KIB, MIB

if TYPE_CHECKING:
    from tonnage.cluster import Cluster
    from tonnage.trace.communicators import Communicators

_CODES = {name: code for code, name in enumerate(ACTIONS)}


class CardMemory:
    """The replica of the allocator (`tonnage.allocator`) on a GPU that also holds the CUDA context and NCCL."""

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
        """Return the most bytes allocated at once, rounded, including remainders too small to split off."""
        return self._allocator.peak_allocated_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """Return the most bytes held from the driver at once."""
        return self._allocator.peak_reserved_bytes

    @property
    def retries(self) -> int:
        """Return how often cached memory was freed to serve a request."""
        return self._allocator.counters["num_alloc_retries"]

    def allocate(self, size_bytes: int, mark: int) -> int:
        """Return a block as torch's allocator chooses it.  Raises DoesNotFit."""
        self._allocator.mark = mark
        try:
            return self._allocator.malloc(size_bytes, self._stream())
        except OutOfMemory as error:
            raise DoesNotFit(_torch_message(error.shortage)) from None

    def free(self, address: int, size_bytes: int, mark: int) -> None:
        """Free a block to the allocator, which caches it."""
        self._allocator.mark = mark
        self._allocator.free(address)

    def connect(self, used: Communicators) -> None:
        """Take the memory that NCCL takes for these communicators, outside of the allocator.  Raises DoesNotFit."""
        device, per_node = self._cluster.device, self._cluster.gpus_per_node
        taken = overheads(device, used.sizes, gpus_per_node=per_node, send_recv_peers=used.peers).nccl_bytes
        if not self._driver.create(taken - self._nccl_bytes):
            raise DoesNotFit("NCCL error: unhandled cuda error; Cuda failure 2 'out of memory'")
        self._nccl_bytes = taken

    def columns(self) -> dict[str, array[int]]:
        """Return all of the allocator's events."""
        columns = {name: array("q") for name in EVENT_COLUMNS}
        for event in self._allocator.events:
            for name, value in zip(EVENT_COLUMNS, (_CODES[event.action], *event[1:]), strict=True):
                columns[name].append(value)
        return columns


def _torch_message(shortage: Shortage) -> str:
    """Return the beginning of the message of torch's own error."""
    sizes = {
        "requested": shortage.segment_bytes,
        "total": shortage.total_bytes,
        "free": shortage.free_bytes,
        "allocated": shortage.allocated_bytes,
        "cached": shortage.reserved_bytes - shortage.allocated_bytes,
    }
    return (
        "CUDA out of memory. Tried to allocate {requested}. GPU 0 has a total capacity of {total} of which {free} is "
        "free. Of the allocated memory {allocated} is allocated by PyTorch, and {cached} is reserved by PyTorch but "
        "unallocated."
    ).format(**{name: _format_size(count_bytes) for name, count_bytes in sizes.items()})


def _format_size(count_bytes: int) -> str:
    """Return the size as torch's allocator formats it: 192.00 MiB."""
    for unit, width in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count_bytes > width:
            return f"{count_bytes / width:.2f} {unit}"
    return f"{count_bytes} bytes"
