"""Memory of the host that a job would need on a real machine.

On a ghost, pinned memory and zeros that nothing was written to are address space alone (see `values`), so the process
is smaller than the job: what it does not touch is counted here.
"""

from importlib import import_module
from typing import Any


class Zeros:
    """Host tensors of zeros that were made and not touched."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._live: dict[int, tuple[Any, int]] = {}
        self._live_bytes = 0

    def add(self, tensor: Any) -> None:
        """Count the tensor's memory for as long as it lives."""
        storage = tensor.untyped_storage()
        self._drop(storage.data_ptr())
        reference = import_module("torch.multiprocessing.reductions").StorageWeakRef(storage)
        self._live[storage.data_ptr()] = (reference, storage.nbytes())
        self._live_bytes += storage.nbytes()
        if self._live_bytes > self.peak_bytes:
            for address in [place for place, (reference, _) in self._live.items() if reference.expired()]:
                self._drop(address)
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)

    def _drop(self, address: int) -> None:
        _, count_bytes = self._live.pop(address, (None, 0))
        self._live_bytes -= count_bytes


ZEROS = Zeros()
"""Of this process."""


def resident_peak_bytes() -> int:
    """Most bytes of this process that were resident at once."""
    import resource  # not on Windows, where traces tell versions alone

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_bytes(pinned_peak_bytes: int) -> int:
    """Most bytes that the job would need at once, at most: what is resident, pinned, and zero."""
    return resident_peak_bytes() + pinned_peak_bytes + ZEROS.peak_bytes
