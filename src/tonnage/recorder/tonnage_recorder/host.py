"""Memory of the host that a job would need on a real machine.

On a ghost, pinned memory and zeros that nothing was written to are address space alone (see `values`), so the process
is smaller than the job: memory that it does not touch is counted here.
"""

from importlib import import_module
from typing import Any

FEW = 64
"""Number of tensors up to which all are checked each time that their bytes may exceed the peak."""


class Zeros:
    """Host tensors of zeros that were created and not touched."""

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
            self._update_peak()

    def peak_bytes(self) -> int:
        """Return the most bytes alive at once; with many tensors, accurate to an eighth."""
        self._update_peak()
        return self._most_bytes

    def _update_peak(self) -> None:
        for address in [address for address, (reference, _) in self._live.items() if reference.expired()]:
            self._drop(address)
        self._looked_at = len(self._live)
        self._most_bytes = max(self._most_bytes, self._live_bytes)

    def _drop(self, address: int) -> None:
        _, count_bytes = self._live.pop(address, (None, 0))
        self._live_bytes -= count_bytes


ZEROS = Zeros()
"""The untouched zeros of this process."""


def resident_peak_bytes() -> int:
    """Return the most bytes of this process that were resident at once."""
    import resource  # not on Windows, where traces tell versions alone

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read_peaks(pinned_bytes: int, managed_bytes: int) -> dict[str, int]:
    """Return the host's memory as a Trace has it, for these peaks of pinned and managed memory.

    `peak_bytes` is an upper bound of the peak that the job would need: the sum of the resident, pinned and zero
    peaks.
    """
    zero_bytes = ZEROS.peak_bytes()
    return {
        "peak_bytes": resident_peak_bytes() + pinned_bytes + zero_bytes,
        "pinned_bytes": pinned_bytes,
        "managed_bytes": managed_bytes,
        "zero_bytes": zero_bytes,
    }
