"""The allocator's counters, with the names of `torch.cuda.memory_stats`."""

from collections.abc import Iterator
from typing import Final

STATISTIC_NAMES: Final = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)
"""Names of the statistics that are kept for all blocks, for the small pools and for the large pools."""


class Stat:
    """One counted quantity: its current value, its peak, and the sums of all increases and decreases."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def increase(self, amount: int) -> None:
        """Add `amount`, which must not be negative."""
        self.current += amount
        self.allocated += amount
        if self.current > self.peak:
            self.peak = self.current

    def decrease(self, amount: int) -> None:
        """Subtract `amount`, which must not be negative."""
        self.current -= amount
        self.freed += amount

    def change(self, amount: int) -> None:
        """Increase or decrease, depending on the sign of `amount`."""
        if amount > 0:
            self.increase(amount)
        elif amount < 0:
            self.decrease(-amount)

    def reset_peak(self) -> None:
        """Set the peak to the current value."""
        self.peak = self.current

    def reset_accumulated(self) -> None:
        """Set the sums of all increases and decreases to zero."""
        self.allocated = self.freed = 0

    def items(self, name: str) -> Iterator[tuple[str, int]]:
        """Yield the four numbers with their names, e.g. `segment.all.peak`."""
        yield f"{name}.current", self.current
        yield f"{name}.peak", self.peak
        yield f"{name}.allocated", self.allocated
        yield f"{name}.freed", self.freed


class Statistics:
    """The nine quantities of STATISTIC_NAMES for one set of blocks."""

    __slots__ = STATISTIC_NAMES

    allocation: Stat
    segment: Stat
    active: Stat
    inactive_split: Stat
    allocated_bytes: Stat
    reserved_bytes: Stat
    active_bytes: Stat
    inactive_split_bytes: Stat
    requested_bytes: Stat

    def __init__(self) -> None:
        for name in STATISTIC_NAMES:
            setattr(self, name, Stat())

    def items(self) -> Iterator[tuple[str, Stat]]:
        """Return the quantities with their names."""
        return ((name, getattr(self, name)) for name in STATISTIC_NAMES)

    def __iter__(self) -> Iterator[Stat]:
        return (getattr(self, name) for name in STATISTIC_NAMES)

    def count_allocation(self, block_bytes: int, requested_bytes: int) -> None:
        """Count a block that is allocated to the program."""
        self.allocation.increase(1)
        self.allocated_bytes.increase(block_bytes)
        self.active.increase(1)
        self.active_bytes.increase(block_bytes)
        self.requested_bytes.increase(requested_bytes)

    def count_free_request(self, block_bytes: int) -> None:
        """Count a block that the program freed; other streams may still use it."""
        self.allocation.decrease(1)
        self.allocated_bytes.decrease(block_bytes)

    def count_free(self, block_bytes: int, requested_bytes: int) -> None:
        """Count a freed block that no stream uses any more."""
        self.active.decrease(1)
        self.active_bytes.decrease(block_bytes)
        self.requested_bytes.decrease(requested_bytes)

    def count_split_change(self, blocks: int, size_bytes: int) -> None:
        """Count a change in the number and the bytes of the free parts of split segments."""
        self.inactive_split.change(blocks)
        self.inactive_split_bytes.change(size_bytes)
