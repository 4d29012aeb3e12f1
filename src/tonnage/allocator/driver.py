"""The memory of one device as the CUDA driver deals it out: a capacity, and addresses."""

from collections.abc import Iterable
from typing import Final

from tonnage.allocator.settings import round_up
from tonnage.units import MIB

GRANULARITY_BYTES: Final = 2 * MIB
"""Physical memory comes in pages of this size, for cudaMalloc (above 1 MiB) as for cuMemCreate."""
_FIRST_ADDRESS: Final = 32 * MIB
_RANGE_ALIGNMENT_BYTES: Final = 32 * MIB


class Driver:
    """A capacity and an address space: freed addresses are handed out again from the lowest, else new ones.

    NVIDIA does not say which address cudaMalloc returns, and torch up to 2.11 prefers low addresses, so for those
    versions two runs may place equal blocks differently.  From 2.12 on addresses decide nothing.
    """

    def __init__(self, total_bytes: int, *, taken_bytes: int = 0, recorded_addresses: Iterable[int] = ()) -> None:
        """`total_bytes` as the driver reports it; `taken_bytes` by context, NCCL and other processes.

        `recorded_addresses` are what a real cudaMalloc returned, in order; they are returned while they last.
        """
        self.total_bytes = total_bytes
        self.used_bytes = taken_bytes
        self._next = _FIRST_ADDRESS
        self._freed: list[tuple[int, int]] = []
        self._recorded = iter(recorded_addresses)

    @property
    def free_bytes(self) -> int:
        """What cudaMemGetInfo reports as free."""
        return max(self.total_bytes - self.used_bytes, 0)

    def malloc(self, size_bytes: int) -> int | None:
        """cudaMalloc: an address, or None when memory does not suffice."""
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
        """cudaFree of what `malloc` returned for this size."""
        size = round_up(size_bytes, GRANULARITY_BYTES)
        self.release(size)
        self._freed.append((address, size))

    def reserve(self, size_bytes: int) -> int:
        """cuMemAddressReserve: addresses without memory."""
        return self._take(size_bytes, _RANGE_ALIGNMENT_BYTES)

    def create(self, size_bytes: int) -> bool:
        """cuMemCreate: memory without addresses; False when it does not suffice."""
        if self.used_bytes + size_bytes > self.total_bytes:
            return False
        self.used_bytes += size_bytes
        return True

    def release(self, size_bytes: int) -> None:
        """cuMemRelease."""
        self.used_bytes -= size_bytes

    def _take(self, size_bytes: int, alignment_bytes: int) -> int:
        address = round_up(self._next, alignment_bytes)
        self._next = round_up(address + size_bytes, GRANULARITY_BYTES)
        return address
