"""Estimate what a candidate needs from runs of similar candidates.

Each candidate has a lower bound and an estimate of what runs usually need on top.  The nearest run of the same kind
says which part of that estimate was really needed, and corrects it.  Probes show less than whole runs need; whole
runs of the same kind say by how much.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log
from typing import Any, Final

from tonnage.planner.pricing import Priced
from tonnage.planner.search_space import OFFLOADS

_AXIS_DISTANCE: Final = {"tp": 0.3, "pp": 0.3, "ep": 0.3, "cp": 0.05}
"""Distance between two runs for each parallel dimension in which they differ, in the scale of log(tokens).

A rank under `cp` does with its part of a long sequence what it would do with a short one."""

_LOSS_DISTANCE: Final = 0.1
"""Distance between two runs with different losses, whose bytes are part of what a run usually needs."""

_NEAR: Final = max(_AXIS_DISTANCE.values())
"""The largest distance at which runs with another sharding still count: one parallel dimension."""

_ERROR_OF_SIMILAR: Final = 0.02
"""The relative error of an estimate from a run at distance 0."""

_ERROR_PER_DISTANCE: Final = 0.25
"""The relative error added for each unit of distance."""

_ERROR_UNKNOWN: Final = 0.4
"""The relative error where there was no similar run."""


@dataclass(frozen=True)
class _Run:
    """A candidate that was run, and what it needed."""

    priced: Priced
    """The candidate."""
    need_bytes: int
    """Peak of the process; for a probe without the allocator's cached blocks."""
    is_probe: bool
    """True if only a few layers were run."""


class Expectation:
    """The runs so far, grouped by what decides how far a need is above its bound."""

    def __init__(self) -> None:
        self._similar: dict[tuple[Any, ...], list[_Run]] = {}
        self._related: dict[tuple[Any, ...], list[_Run]] = {}
        self._whole_to_probe: dict[tuple[bool, ...], float] = {}

    def add_probe(self, priced: Priced, need_bytes: int) -> None:
        """Record what a probe has shown a candidate to need at least."""
        self._add(_Run(priced, need_bytes, is_probe=True))

    def add_whole_run(self, priced: Priced, need_bytes: int) -> None:
        """Record what a whole run of a candidate needed."""
        for run in self._similar.get(_group(priced), ()):
            if run.priced is priced and run.is_probe:
                ratio = need_bytes / run.need_bytes
                self._whole_to_probe[_kind(priced)] = min(ratio, self._whole_to_probe.get(_kind(priced), ratio))
        self._add(_Run(priced, need_bytes, is_probe=False))

    def _add(self, run: _Run) -> None:
        self._similar.setdefault(_group(run.priced), []).append(run)
        self._related.setdefault(_wide_group(run.priced), []).append(run)

    def has_run(self, method: str) -> bool:
        """Return whether any candidate of a method has run."""
        return any(group[0] == method for group in self._similar)

    def whole_to_probe(self, priced: Priced, unknown: float = 1.0) -> float:
        """Return the smallest ratio of a whole run's need to its probe's, of this kind; `unknown` without any."""
        return self._whole_to_probe.get(_kind(priced), unknown)

    def bytes(self, priced: Priced) -> float:
        """Return what a candidate is expected to need."""
        nearest = self._find_similar(priced) or self._find_related(priced)
        if nearest is None:
            return priced.bound_bytes + priced.extra_bytes
        other = nearest.priced
        need = nearest.need_bytes * (self.whole_to_probe(other) if nearest.is_probe else 1.0)
        return priced.bound_bytes + priced.extra_bytes * (need - other.bound_bytes) / other.extra_bytes

    def error(self, priced: Priced) -> float:
        """Return the relative error of `bytes`; infinite if nothing is known of the network either."""
        nearest = self._find_similar(priced)
        if nearest is None:
            return _ERROR_UNKNOWN if priced.bound_bytes else inf
        return _ERROR_OF_SIMILAR + _ERROR_PER_DISTANCE * _distance(priced, nearest.priced)

    def _find_similar(self, priced: Priced) -> _Run | None:
        """Return the nearest run of the same group, the latest of equally near ones."""
        runs = self._similar.get(_group(priced), ())
        return min(reversed(runs), key=lambda run: _distance(priced, run.priced), default=None)

    def _find_related(self, priced: Priced) -> _Run | None:
        """Return the nearest run with another sharding, whose effect the bound covers, if it is near enough."""
        runs = [run for run in self._related.get(_wide_group(priced), ()) if _distance(priced, run.priced) <= _NEAR]
        return min(reversed(runs), key=lambda run: _distance(priced, run.priced), default=None)


def _group(priced: Priced) -> tuple[Any, ...]:
    """Return what decides how far a need is above the bound."""
    plan = priced.candidate.plan
    return (*_wide_group(priced), plan.shard, plan.accum_sync or priced.candidate.job.grad_accum == 1)


def _wide_group(priced: Priced) -> tuple[Any, ...]:
    """Return the same without how weights, gradients and states are sharded."""
    job, plan = priced.candidate.job, priced.candidate.plan
    return (
        job.method,
        plan.precision,
        plan.optimizer,
        plan.checkpointing,
        plan.optimizer_in_backward,
        *(getattr(plan, name) for name in OFFLOADS),
    )


def _kind(priced: Priced) -> tuple[bool, ...]:
    """Return what decides how much of a rank's memory a probe does not show."""
    plan = priced.candidate.plan
    return (plan.pp > 1, plan.tp > 1, plan.checkpointing == "none")


def _distance(priced: Priced, other: Priced) -> float:
    plan, other_plan = priced.candidate.plan, other.candidate.plan
    axes = sum(far for name, far in _AXIS_DISTANCE.items() if getattr(plan, name) != getattr(other_plan, name))
    axes += _LOSS_DISTANCE if plan.loss != other_plan.loss else 0.0
    return abs(log(priced.tokens_at_once / other.tokens_at_once)) + axes
