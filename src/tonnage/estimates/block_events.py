"""The allocator's events of a Trace as numpy columns."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from tonnage.recorder.tonnage_recorder.record_layout import ACTIONS, EVENT_COLUMNS
from tonnage.trace.trace import Mark, Trace

ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, OOM = (
    ACTIONS.index(name)
    for name in (
        *("alloc", "free_requested", "free_completed", "segment_alloc"),
        *("segment_free", "segment_map", "segment_unmap", "oom"),
    )
)


Numbers = NDArray[np.int64]


Flags = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class Events:
    """The allocator's events as columns, and where in them each mark begins."""

    action: Numbers
    address: Numbers
    size: Numbers
    """Requested bytes."""
    mark: Numbers
    """The mark under which each event happened; never falls."""
    begin: Numbers
    """Number of events before each mark."""
    step: Numbers
    """Optimizer steps completed at each mark."""
    phase: Numbers
    """Index in `phases` of each mark's phase."""
    phases: tuple[str, ...]
    """The names of all phases."""

    @staticmethod
    def of(trace: Trace) -> "Events":
        """Return the events of a Trace."""
        columns = {name: np.asarray(trace.event_columns.get(name, ()), dtype=np.int64) for name in EVENT_COLUMNS}
        mark = np.maximum.accumulate(columns["mark"])
        steps, names, _ = zip(*(trace.marks or (Mark(0, "", ""),)), strict=True)
        phases = {name: place for place, name in enumerate(dict.fromkeys(names))}
        return Events(
            action=columns["action"],
            address=columns["address"],
            size=columns["size"],
            mark=mark,
            begin=np.searchsorted(mark, np.arange(len(steps))),
            step=np.array(steps, dtype=np.int64),
            phase=np.array(itemgetter(*names, names[0])(phases)[:-1], dtype=np.int64),
            phases=tuple(phases),
        )

    def __len__(self) -> int:
        return len(self.action)

    def of_kind(self, *actions: int) -> Numbers:
        """Return the indices of the events of these kinds."""
        return np.flatnonzero(_is_one_of(self.action, actions))

    def is_in(self, phases: Iterable[str]) -> Flags:
        """Return for each mark True if it is in one of these phases."""
        return np.array([name in phases for name in self.phases])[self.phase]

    @cached_property
    def by_address(self) -> Numbers:
        """Return the indices of the events of blocks, sorted by address and then by time."""
        index = self.of_kind(ALLOC, FREE_REQUESTED, FREE_COMPLETED)
        return index[np.argsort(self.address[index], kind="stable")]

    @cached_property
    def action_by_address(self) -> Numbers:
        """Return the actions of these events."""
        return self.action[self.by_address]


def _is_one_of(values: Numbers, few: Iterable[int]) -> Flags:
    matches = np.zeros(len(values), dtype=np.bool_)
    for value in few:
        matches |= values == value
    return matches
