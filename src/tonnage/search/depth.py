"""Looks: one step, and a few of the equal layers, say what all steps of the whole network will need.

The first step makes the optimizer's states, and all later ones are like it beside them: its trace is added up with
the states there from the beginning.

Of a deep network two such runs are made, with few layers.  Each phase's peak grows by as much for each further layer;
which phase is the highest may change with depth, so the phases are followed one by one.  A phase's own peak is the
highest of several moments, each linear in depth, so what is found this way is rather too low than too high, and a
plan that is shown has been run whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import TYPE_CHECKING, Any, Final

from tonnage.axes import SHARDING
from tonnage.estimates import Estimate
from tonnage.job import Job
from tonnage.plans import Plan
from tonnage.timeline import settled

if TYPE_CHECKING:
    from tonnage.summary import Run

WORTH: Final = 3
"""The deeper of the two runs has at most so much less than the whole, or the whole is run."""

_LEAST: Final = 2
"""Layers of the shallower run: the first and the last of a network are not like those between."""

_LEAST_SHARDED: Final = 6
"""The same where weights are gathered: buffers for several layers are in use at once, whatever the depth."""

_FURTHER: Final = 2
"""Layers more in the deeper run, at least."""


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


def seen(run: Run) -> Look:
    """What a run of one rank's first step says of all."""
    [trace] = run.traces
    walked = settled(trace)
    phases: dict[str, int] = {}
    for mark, (allocated, _) in zip(walked.marks, walked.by_mark, strict=True):
        phases[mark.phase] = max(phases.get(mark.phase, 0), allocated)
    cached = max(walked.peak_reserved_bytes - walked.peak_allocated_bytes, 0)
    runtime = run.estimate.peak.by_category["runtime"]
    return Look(allocated_bytes=phases, by_category={**walked.by_category(), "cached": cached, "runtime": runtime})


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


def depths(job: Job, plan: Plan) -> tuple[int, int] | None:
    """Numbers of layers for two runs in place of one; None where the whole is as well, or layers are not alike."""
    config = job.model.config
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int) or config.get("is_encoder_decoder") or config.get("mlp_only_layers"):
        return None
    if plan.checkpointing.startswith("budget"):
        return None  # a number of bytes for all layers together
    period = _period(config)
    if period is None:
        return None
    first = int(config.get("first_k_dense_replace") or 0)
    if plan.pp > 1:
        stages = plan.pp * (plan.pp_stages if plan.pp_schedule == "interleaved" else 1)
        if first or stages % period:
            return None
        period = stages
    least = _LEAST_SHARDED if plan.shard in SHARDING else _LEAST
    small = first + period * -(-least // period)
    large = small + period * -(-_FURTHER // period)
    return (small, large) if large * WORTH <= layers else None


def _period(config: Mapping[str, Any]) -> int | None:
    """After how many layers their kinds repeat; None where they do not."""
    found = int(config.get("decoder_sparse_step") or 1)
    found = lcm(found, int(config.get("sliding_window_pattern") or 1), int(config.get("moe_layer_freq") or 1))
    kinds = config.get("layer_types")
    if isinstance(kinds, Sequence) and kinds:
        same = (
            size for size in range(1, len(kinds)) if all(a == b for a, b in zip(kinds, kinds[size:], strict=False))
        )
        repeats = next(same, None)
        return None if repeats is None else lcm(found, repeats)
    return found


def with_layers(job: Job, layers: int) -> Job:
    """The job of a network with so many layers, otherwise the same."""
    config = dict(job.model.config)
    if isinstance(config.get("layer_types"), Sequence):
        config["layer_types"] = list(config["layer_types"])[:layers]
    config["num_hidden_layers"] = layers
    return replace(job, model=replace(job.model, config=config))


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
