"""A replica of the CUDA driver's memory management for one device: a capacity and an address space."""

from collections.abc import Iterable
from typing import Final

from tonnage.allocator.settings import round_up
from tonnage.units import MIB

GRANULARITY_BYTES: Final = 2 * MIB
"""Page size of physical memory, for cudaMalloc (above 1 MiB) and for cuMemCreate."""
_FIRST_ADDRESS: Final = 32 * MIB
_RANGE_ALIGNMENT_BYTES: Final = 32 * MIB


class Driver:
    """A capacity and an address space: the lowest freed address that fits is reused, otherwise a new one is returned.

    NVIDIA does not document which address cudaMalloc returns, and torch up to 2.11 prefers low addresses, so with
    those versions two runs may place equal blocks differently.  From torch 2.12 on, addresses decide nothing.
    """

    def __init__(self, total_bytes: int, *, taken_bytes: int = 0, recorded_addresses: Iterable[int] = ()) -> None:
        """Create a device with `total_bytes`, as the driver reports them.

        `taken_bytes` of them are used by the CUDA context, NCCL and other processes.  `recorded_addresses` are the
        results of a real cudaMalloc in order; they are returned first.
        """
        self.total_bytes = total_bytes
        self.used_bytes = taken_bytes
        self._next = _FIRST_ADDRESS
        self._freed: list[tuple[int, int]] = []
        self._recorded = iter(recorded_addresses)

    @property
    def free_bytes(self) -> int:
        """Return the free bytes that cudaMemGetInfo reports."""
        return max(self.total_bytes - self.used_bytes, 0)

    def malloc(self, size_bytes: int) -> int | None:
        """Return an address like cudaMalloc, or None when there is not enough memory."""
        size = round_up(size_bytes, GRANULARITY_BYTES)
        if not self.create(size):
            return None
        recorded = next(self._recorded, None)
        if recorded is not None:
            return recorded
        candidates = [entry for entry in self._freed if entry[1] >= size]
        if not candidates:
            return self._take(size, GRANULARITY_BYTES)
        address, available = min(candidates)
        self._freed.remove((address, available))
        if available > size:
            self._freed.append((address + size, available - size))
        return address

    def free(self, address: int, size_bytes: int) -> None:
        """Free an address that `malloc` returned for this size, like cudaFree."""
        size = round_up(size_bytes, GRANULARITY_BYTES)
        self.release(size)
        self._freed.append((address, size))

    def reserve(self, size_bytes: int) -> int:
        """Return the start of a reserved range of addresses without memory, like cuMemAddressReserve."""
        return self._take(size_bytes, _RANGE_ALIGNMENT_BYTES)

    def create(self, size_bytes: int) -> bool:
        """Take memory without addresses, like cuMemCreate; return False when there is not enough."""
        if self.used_bytes + size_bytes > self.total_bytes:
            return False
        self.used_bytes += size_bytes
        return True

    def release(self, size_bytes: int) -> None:
        """Give back memory without addresses, like cuMemRelease."""
        self.used_bytes -= size_bytes

    def _take(self, size_bytes: int, alignment_bytes: int) -> int:
        address = round_up(self._next, alignment_bytes)
        self._next = round_up(address + size_bytes, GRANULARITY_BYTES)
        return address
