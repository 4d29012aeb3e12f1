"""Probes: what one step of a few layers says about all steps of the whole network.

The first step makes the optimizer's states.  Later steps equal it except that the states are there from the start, so
its trace is summed up with them in place.

A deep network is probed at two small depths.  What is allocated while a module runs grows by the same amount for each
further layer.  The module that runs at the peak may change with depth (in a decoder with checkpointing, then its
encoder), so each module is extrapolated on its own, and of a stack of layers the first and the last, because no peak
lies between them.  A module's own peak is the highest of several moments that are each linear in depth, so the result
is rather too low than too high; a plan is only shown after a run of the whole network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from tonnage.estimates.estimate import Estimate
from tonnage.estimates.from_traces import outside_allocator
from tonnage.estimates.timeline import build_steady_timeline

if TYPE_CHECKING:
    from tonnage.cluster import Cluster
    from tonnage.trace.trace import Trace

_FIXED: Final = ("communication", "cached", "runtime")
"""Categories that do not grow with depth."""

_NO_LAYER: Final = -1
"""The layer number of a module outside of every layer."""


class Moment(NamedTuple):
    """A place in a step."""

    phase: str
    """As in a Trace."""
    module: str
    """Dotted name of the module that is running; empty for none."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The memory need of a step with the optimizer's states in place from its beginning."""

    allocated_bytes: dict[Moment, int]
    """Most bytes allocated at each moment."""
    by_category: dict[str, int]
    """At the peak of all phases, with the allocator's cached blocks (cached) and what is outside it (runtime)."""

    @property
    def process_bytes(self) -> int:
        """Return the peak of the process."""
        return sum(self.by_category.values())


def summarize_trace(trace: Trace, cluster: Cluster, *, by_module: bool = True) -> Probe:
    """Return what one rank's first step says about all steps.

    Without `by_module` each phase is one moment: stages of a pipeline have one layer in the smaller network, two in
    the larger.
    """
    timeline = build_steady_timeline(trace)
    moments: dict[Moment, int] = {}
    for mark, allocated in zip(timeline.marks, timeline.allocated_by_mark.tolist(), strict=True):
        moment = Moment(mark.phase, mark.module if by_module else "")
        moments[moment] = max(moments.get(moment, 0), allocated)
    cached = max(timeline.peak_reserved_bytes - timeline.peak_allocated_bytes, 0)
    outside = {"cached": cached, "runtime": outside_allocator(trace, cluster).bytes}
    return Probe(allocated_bytes=moments, by_category={**timeline.by_category(), **outside})


@dataclass(frozen=True, kw_only=True)
class Need:
    """The memory that a candidate needs."""

    process_bytes: int
    """Peak of the process."""
    by_category: dict[str, int]
    """Sums to it."""
    uncached_bytes: int
    """The same without the allocator's cached blocks, which a network of another depth may not have."""
    whole: bool
    """True if the whole network was run."""


def need_of(run: Estimate | Probe) -> Need:
    """Return the need that a run of the whole network shows."""
    peak = run if isinstance(run, Probe) else run.peak
    return Need(
        process_bytes=peak.process_bytes,
        by_category=dict(peak.by_category),
        uncached_bytes=peak.process_bytes,
        whole=True,
    )


def extrapolate(small: Probe, large: Probe, depths: tuple[int, int], layers: int) -> Need:
    """Return what a network with this number of layers needs, from probes at two depths."""
    ratio = (layers - depths[1]) / (depths[1] - depths[0])

    def extend(at_small: float, at_large: float) -> float:
        return at_large + (at_large - at_small) * ratio

    small_peaks = _peaks_by_place(small)
    allocated = int(max(extend(small_peaks.get(place, peak), peak) for place, peak in _peaks_by_place(large).items()))
    process = allocated + max(_unallocated_bytes(probe) for probe in (small, large))
    held = {
        name: max(extend(small.by_category.get(name, 0), size), 0.0) if name not in _FIXED else float(size)
        for name, size in large.by_category.items()
    }
    scale = process / max(sum(held.values()), 1.0)
    rounded = {name: int(value * scale) for name, value in held.items()}
    largest = max(rounded, key=lambda name: rounded[name])
    rounded[largest] += process - sum(rounded.values())
    uncached = allocated + large.by_category["runtime"]
    return Need(process_bytes=process, by_category=rounded, uncached_bytes=uncached, whole=False)


def _unallocated_bytes(probe: Probe) -> int:
    """Return the bytes of the process that are not allocated."""
    return probe.by_category["cached"] + probe.by_category["runtime"]


def _peaks_by_place(probe: Probe) -> dict[Moment, int]:
    """Return the peak of each phase, and in it of each module that networks of every depth have."""
    layers: dict[str, set[int]] = {}
    for stack, layer, _ in (_split_name(moment.module) for moment in probe.allocated_bytes):
        layers.setdefault(stack, set()).add(layer)
    ends = {stack: {min(found): "first", max(found): "last"} for stack, found in layers.items() if len(found) > 1}
    peaks: dict[Moment, int] = {}
    for (phase, module), allocated in probe.allocated_bytes.items():
        for place in (Moment(phase, ""), Moment(phase, _depthless_name(module, ends))):
            peaks[place] = max(peaks.get(place, 0), allocated)
    return peaks


def _depthless_name(module: str, ends: Mapping[str, Mapping[int, str]]) -> str:
    """Return a module's name at any depth: empty in a layer between the first and the last."""
    stack, layer, within = _split_name(module)
    if layer == _NO_LAYER:
        return module
    end = ends.get(stack, {}).get(layer)
    return f"{stack}.{end}.{within}" if end else ""


def _split_name(module: str) -> tuple[str, int, str]:
    """Return the stack of a module, its layer (the first number in its name), and its name within the layer."""
    names = module.split(".")
    number = next((index for index, name in enumerate(names) if name.isdigit()), None)
    if number is None:
        return "", _NO_LAYER, module
    return ".".join(names[:number]), int(names[number]), ".".join(names[number + 1 :])
