"""Memory of the host that a job would need on a real machine.

On a ghost, pinned memory and zeros that nothing was written to are address space alone (see `values`), so the process
is smaller than the job: what it does not touch is counted here.
"""

from importlib import import_module
from typing import Any

FEW = 64
"""Tensors that are looked through each time that there may be more than ever."""


class Zeros:
    """Host tensors of zeros that were made and not touched."""

    def __init__(self) -> None:
        self._most_bytes = 0
        self._live: dict[int, tuple[Any, int]] = {}
        self._live_bytes = 0
        self._looked_at = 0

    def add(self, tensor: Any) -> None:
        """Count the tensor's memory for as long as it lives."""
        storage = tensor.untyped_storage()
        self._drop(storage.data_ptr())
        reference = import_module("torch.multiprocessing.reductions").StorageWeakRef(storage)
        self._live[storage.data_ptr()] = (reference, storage.nbytes())
        self._live_bytes += storage.nbytes()
        count = len(self._live)
        if self._live_bytes > self._most_bytes and (count <= FEW or count > self._looked_at * 9 // 8):
            self._look()

    def peak_bytes(self) -> int:
        """Most bytes at once, of many tensors to an eighth."""
        self._look()
        return self._most_bytes

    def _look(self) -> None:
        for address in [place for place, (reference, _) in self._live.items() if reference.expired()]:
            self._drop(address)
        self._looked_at = len(self._live)
        self._most_bytes = max(self._most_bytes, self._live_bytes)

    def _drop(self, address: int) -> None:
        _, count_bytes = self._live.pop(address, (None, 0))
        self._live_bytes -= count_bytes


ZEROS = Zeros()
"""Of this process."""


def resident_peak_bytes() -> int:
    """Most bytes of this process that were resident at once."""
    import resource  # not on Windows, where traces tell versions alone

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peaks(pinned_bytes: int, managed_bytes: int) -> dict[str, int]:
    """What a Trace has of the host, where so much was pinned and managed at most.

    `peak_bytes` is most of what the job would need at once, at most: what is resident, pinned, and zero.
    """
    zero_bytes = ZEROS.peak_bytes()
    return {
        "peak_bytes": resident_peak_bytes() + pinned_bytes + zero_bytes,
        "pinned_bytes": pinned_bytes,
        "managed_bytes": managed_bytes,
        "zero_bytes": zero_bytes,
    }
