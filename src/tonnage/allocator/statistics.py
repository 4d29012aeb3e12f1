"""The allocator's counters, under the names that `torch.cuda.memory_stats` gives them."""

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
"""Statistics kept for all blocks, for the small pools and for the large pools."""


class Stat:
    """One counted quantity: its value now, its highest value, and everything ever added and taken away."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def increase(self, amount: int) -> None:
        """Add `amount` (not negative)."""
        self.current += amount
        self.allocated += amount
        if self.current > self.peak:
            self.peak = self.current

    def decrease(self, amount: int) -> None:
        """Take `amount` (not negative) away."""
        self.current -= amount
        self.freed += amount

    def change(self, amount: int) -> None:
        """Increase or decrease, by the sign of `amount`."""
        if amount > 0:
            self.increase(amount)
        elif amount < 0:
            self.decrease(-amount)

    def reset_peak(self) -> None:
        """Let the peak be the present value."""
        self.peak = self.current

    def reset_accumulated(self) -> None:
        """Forget what was ever added and taken away."""
        self.allocated = self.freed = 0

    def items(self, name: str) -> Iterator[tuple[str, int]]:
        """The four numbers with their names, e.g. `segment.all.peak`."""
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
        """The quantities with their names."""
        return ((name, getattr(self, name)) for name in STATISTIC_NAMES)

    def __iter__(self) -> Iterator[Stat]:
        return (getattr(self, name) for name in STATISTIC_NAMES)

    def handed_out(self, block_bytes: int, requested_bytes: int) -> None:
        """A block went to the program."""
        self.allocation.increase(1)
        self.allocated_bytes.increase(block_bytes)
        self.active.increase(1)
        self.active_bytes.increase(block_bytes)
        self.requested_bytes.increase(requested_bytes)

    def given_back(self, block_bytes: int) -> None:
        """The program freed a block; it may still be in use by other streams."""
        self.allocation.decrease(1)
        self.allocated_bytes.decrease(block_bytes)

    def became_free(self, block_bytes: int, requested_bytes: int) -> None:
        """A block that the program had freed can be used again."""
        self.active.decrease(1)
        self.active_bytes.decrease(block_bytes)
        self.requested_bytes.decrease(requested_bytes)

    def split_changed(self, blocks: int, size_bytes: int) -> None:
        """The free parts of split segments changed by this much."""
        self.inactive_split.change(blocks)
        self.inactive_split_bytes.change(size_bytes)
