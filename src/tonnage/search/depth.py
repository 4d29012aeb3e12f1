"""Looks: one step, and a few of the equal layers, say what all steps of the whole network will need.

The first step makes the optimizer's states, and all later ones are like it beside them: its trace is added up with
the states there from the beginning.

Of a deep network two such runs are made, with few layers.  What is allocated while a module runs grows by as much for
each further layer.  Which module runs at the peak may change with depth (a decoder whose layers run again, then its
encoder), so they are followed one by one; of a stack its first and its last layer, between which there is no peak.  A
module's own peak is the highest of several moments, each linear in depth, so what is found this way is rather too low
than too high, and a plan that is shown has been run whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from tonnage.estimates.estimate import Estimate
from tonnage.estimates.summary import outside_allocator
from tonnage.estimates.timeline import settled

if TYPE_CHECKING:
    from tonnage.cluster import Cluster
    from tonnage.trace.trace import Trace

_FIXED: Final = ("communication", "cached", "runtime")
"""Categories that do not grow with depth."""

_NO_LAYER: Final = -1
"""The layer of a module that is in none."""


class Moment(NamedTuple):
    """When in a step."""

    phase: str
    """As in a Trace."""
    module: str
    """Dotted name of the module that is running; empty for none."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a step needs that has the optimizer's states from its beginning."""

    allocated_bytes: dict[Moment, int]
    """Most bytes allocated at each moment."""
    by_category: dict[str, int]
    """At the peak of all phases; with what the allocator kept in reserve (cached), and what is outside (runtime)."""

    @property
    def process_bytes(self) -> int:
        """Peak of the process."""
        return sum(self.by_category.values())


def seen(trace: Trace, cluster: Cluster, *, by_module: bool = True) -> Look:
    """What one rank's first step says of all; without `by_module`, only of each phase as a whole.

    That is for a pipeline's stages, of which the shallower may have one layer and the deeper two.
    """
    walked = settled(trace)
    moments: dict[Moment, int] = {}
    for mark, allocated in zip(walked.marks, walked.allocated_by_mark.tolist(), strict=True):
        moment = Moment(mark.phase, mark.module if by_module else "")
        moments[moment] = max(moments.get(moment, 0), allocated)
    cached = max(walked.peak_reserved_bytes - walked.peak_allocated_bytes, 0)
    outside = {"cached": cached, "runtime": outside_allocator(trace, cluster).bytes}
    return Look(allocated_bytes=moments, by_category={**walked.by_category(), **outside})


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

    less = _by_place(small)
    allocated = int(max(further(less.get(place, most), most) for place, most in _by_place(large).items()))
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


def _by_place(look: Look) -> dict[Moment, int]:
    """Most bytes allocated in each phase, and in it in each module that networks of any depth have."""
    layers: dict[str, set[int]] = {}
    for stack, layer, _ in (_parts(moment.module) for moment in look.allocated_bytes):
        layers.setdefault(stack, set()).add(layer)
    ends = {stack: {min(found): "first", max(found): "last"} for stack, found in layers.items() if len(found) > 1}
    most: dict[Moment, int] = {}
    for (phase, module), allocated in look.allocated_bytes.items():
        for place in (Moment(phase, ""), Moment(phase, _name(module, ends))):
            most[place] = max(most.get(place, 0), allocated)
    return most


def _name(module: str, ends: Mapping[str, Mapping[int, str]]) -> str:
    """What a module is called whatever the depth: empty in a layer between the first and the last."""
    stack, layer, within = _parts(module)
    if layer == _NO_LAYER:
        return module
    end = ends.get(stack, {}).get(layer)
    return f"{stack}.{end}.{within}" if end else ""


def _parts(module: str) -> tuple[str, int, str]:
    """The stack that a module is in, the layer, which is the first number in its name, and its name in that."""
    names = module.split(".")
    number = next((index for index, name in enumerate(names) if name.isdigit()), None)
    if number is None:
        return "", _NO_LAYER, module
    return ".".join(names[:number]), int(names[number]), ".".join(names[number + 1 :])
