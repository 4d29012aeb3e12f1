"""Memory of the host that a job would need on a real machine.

On a ghost, pinned memory and zeros that nothing was written to are address space alone (see `values`), so the process
is smaller than the job: memory that it does not touch is counted here.
"""

import contextlib
from collections.abc import Collection, Iterator
from importlib import import_module
from pathlib import Path
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
        self._is_paused = False
        self.loading_bytes = 0
        """Most bytes alive at once before the end of the first step, if `end_first_step` was called."""

    def end_first_step(self) -> None:
        """Begin another peak: what was alive until now is that of loading."""
        self._update_peak()
        self.loading_bytes, self._most_bytes = self._most_bytes, self._live_bytes

    def add(self, tensor: Any) -> None:
        """Count the tensor's memory for as long as it lives."""
        if self._is_paused:
            return
        storage = tensor.untyped_storage()
        self._drop(storage.data_ptr())
        reference = import_module("torch.multiprocessing.reductions").StorageWeakRef(storage)
        self._live[storage.data_ptr()] = (reference, storage.nbytes())
        self._live_bytes += storage.nbytes()
        count = len(self._live)
        if self._live_bytes > self._most_bytes and (count <= FEW or count > self._looked_at * 9 // 8):
            self._update_peak()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out tensors that are made meanwhile: a real program has them in mapped files."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def peak_bytes(self) -> int:
        """Return the most bytes alive at once since `end_first_step`; with many tensors, accurate to an eighth."""
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


_OWN_FIELDS = ("Private_Clean", "Private_Dirty", "Pss_Shmem")
"""Fields of smaps_rollup that sum up to what a process has for itself, with its share of shared tensors.

A forked worker shares most other pages with the process that started it, where they are counted."""


class Workers:
    """Processes that this one started and that use no GPU, such as those of a DataLoader."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        """Most bytes that they had for themselves together, of the times at which `look` was called."""

    def look(self, process: int, others: Collection[int]) -> None:
        """Measure the descendants of a process, except those in `others`, which are counted on their own."""
        self.peak_bytes = max(self.peak_bytes, sum(map(_own_bytes, _list_descendants(process, others))))


def _list_descendants(process: int, others: Collection[int]) -> Iterator[int]:
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            for child in map(int, children.read_text().split()):
                if child not in others:
                    yield child
                    yield from _list_descendants(child, others)


def _own_bytes(process: int) -> int:
    """Return the memory that a process has for itself; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    sizes = {name: words.split()[0] for name, _, words in (line.partition(":") for line in lines[1:])}
    return sum(int(sizes.get(name, "0")) for name in _OWN_FIELDS) * 1024


WORKERS = Workers()
"""The workers of this process."""


def read_peaks(pinned_bytes: int, managed_bytes: int) -> dict[str, int]:
    """Return the host's memory as a Trace has it, for these peaks of pinned and managed memory.

    `peak_bytes` is an upper bound of the peak that the steps would need: the sum of the resident, pinned and zero
    peaks.  `loading_bytes` are tensors that were there before, `workers_bytes` is the memory of other processes.
    """
    zero_bytes = ZEROS.peak_bytes()
    return {
        "peak_bytes": resident_peak_bytes() + pinned_bytes + zero_bytes,
        "pinned_bytes": pinned_bytes,
        "managed_bytes": managed_bytes,
        "zero_bytes": zero_bytes,
        "loading_bytes": ZEROS.loading_bytes,
        "workers_bytes": WORKERS.peak_bytes,
    }
