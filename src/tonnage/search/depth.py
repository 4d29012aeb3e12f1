"""Looks: one step, and a few of the equal layers, say what all steps of the whole network will need.

The first step makes the optimizer's states, and all later ones are like it beside them: its trace is added up with
the states there from the beginning.

Of a deep network two such runs are made, with few layers.  Each phase's peak grows by as much for each further layer;
which phase is the highest may change with depth, so the phases are followed one by one.  A phase's own peak is the
highest of several moments, each linear in depth, so what is found this way is rather too low than too high, and a
plan that is shown has been run whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tonnage.estimates import Estimate
from tonnage.summary import outside_allocator
from tonnage.timeline import settled

if TYPE_CHECKING:
    from tonnage.device import Cluster
    from tonnage.trace import Trace

_FIXED: Final = ("communication", "cached", "runtime")
"""Categories that do not grow with depth."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a step needs that has the optimizer's states from its beginning."""

    allocated_bytes: dict[str, int]
    """Most bytes allocated in each phase."""
    by_category: dict[str, int]
    """At the peak of all phases; with what the allocator kept in reserve (cached), and what is outside (runtime)."""

    @property
    def process_bytes(self) -> int:
        """Peak of the process."""
        return sum(self.by_category.values())


def seen(trace: Trace, cluster: Cluster) -> Look:
    """What one rank's first step says of all."""
    walked = settled(trace)
    phases: dict[str, int] = {}
    for mark, (allocated, _) in zip(walked.marks, walked.by_mark, strict=True):
        phases[mark.phase] = max(phases.get(mark.phase, 0), allocated)
    cached = max(walked.peak_reserved_bytes - walked.peak_allocated_bytes, 0)
    outside = {"cached": cached, "runtime": outside_allocator(trace, cluster).bytes}
    return Look(allocated_bytes=phases, by_category={**walked.by_category(), **outside})


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a candidate needs."""

    process_bytes: int
    """Peak of the process."""
    by_category: dict[str, int]
    """Sums to it."""
    least_bytes: int
    """The same without what the allocator kept in reserve, which a network of another depth may not."""
    whole: bool
    """Whether the whole network was run."""


def of_run(run: Estimate | Look) -> Need:
    """What a run of the whole network needed."""
    peak = run if isinstance(run, Look) else run.peak
    return Need(
        process_bytes=peak.process_bytes,
        by_category=dict(peak.by_category),
        least_bytes=peak.process_bytes,
        whole=True,
    )


def extrapolated(small: Look, large: Look, depths: tuple[int, int], layers: int) -> Need:
    """What a network of so many layers needs, from looks at two depths."""
    ahead = (layers - depths[1]) / (depths[1] - depths[0])

    def further(less: float, more: float) -> float:
        return more + (more - less) * ahead

    allocated = int(
        max(further(small.allocated_bytes.get(name, most), most) for name, most in large.allocated_bytes.items())
    )
    process = allocated + max(_beyond(look) for look in (small, large))
    held = {
        name: max(further(small.by_category.get(name, 0), more), 0.0) if name not in _FIXED else float(more)
        for name, more in large.by_category.items()
    }
    scale = process / max(sum(held.values()), 1.0)
    rounded = {name: int(value * scale) for name, value in held.items()}
    largest = max(rounded, key=lambda name: rounded[name])
    rounded[largest] += process - sum(rounded.values())
    least = allocated + large.by_category["runtime"]
    return Need(process_bytes=process, by_category=rounded, least_bytes=least, whole=False)


def _beyond(look: Look) -> int:
    """Bytes of a process that are not allocated."""
    return look.by_category["cached"] + look.by_category["runtime"]
