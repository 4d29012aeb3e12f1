"""What runs say of candidates that were not run: interpolation between traces.

The least memory of a candidate is known, and what runs usually need beyond it.  How much of that runs like it really
needed corrects the latter.
"""

from __future__ import annotations

from math import inf, log
from typing import Any, Final

from tonnage.search.pricing import Priced
from tonnage.search.space import OFFLOADS

_OTHER_AXIS: Final = {"tp": 0.3, "pp": 0.3, "ep": 0.3, "cp": 0.05}
"""How far apart two runs are for a parallel dimension in which they differ, in the scale of log(tokens).

With its part of longer sequences a rank of `cp` does what it would do with shorter ones."""

_ERROR_OF_LIKE: Final = 0.02
"""Of what is expected, how far a run may be off that is like one that was made."""

_ERROR_APART: Final = 0.25
"""The same for each unit that it is apart from that one."""

_ERROR_UNKNOWN: Final = 0.4
"""The same where there was no run like it."""


class Expectation:
    """Runs so far, by what decides how far a need is above the least."""

    def __init__(self) -> None:
        self._runs: dict[tuple[Any, ...], list[tuple[Priced, float]]] = {}

    def learn(self, one: Priced, need_bytes: int) -> None:
        """Note what a candidate was found to need."""
        self._runs.setdefault(_like(one), []).append((one, float(need_bytes)))

    def bytes(self, one: Priced) -> float:
        """What a candidate is expected to need."""
        found = self._nearest(one)
        if found is None:
            return one.least_bytes + one.beyond_bytes
        nearest, need = found
        return one.least_bytes + one.beyond_bytes * (need - nearest.least_bytes) / nearest.beyond_bytes

    def error(self, one: Priced) -> float:
        """By which part of it the need may be off: by any, if nothing is known of the network either."""
        found = self._nearest(one)
        if found is None:
            return _ERROR_UNKNOWN if one.least_bytes else inf
        return _ERROR_OF_LIKE + _ERROR_APART * _apart(one, found[0])

    def _nearest(self, one: Priced) -> tuple[Priced, float] | None:
        """The run that is most like a candidate, the latest of equally near ones, and its need."""
        runs = self._runs.get(_like(one), ())
        return min(reversed(runs), key=lambda run: _apart(one, run[0]), default=None)


def _like(one: Priced) -> tuple[Any, ...]:
    job, plan = one.candidate.job, one.candidate.plan
    return (
        job.method,
        plan.shard,
        plan.precision,
        plan.loss,
        plan.optimizer,
        plan.checkpointing,
        plan.optimizer_in_backward,
        plan.accum_sync or job.grad_accum == 1,
        *(getattr(plan, name) for name in OFFLOADS),
    )


def _apart(one: Priced, other: Priced) -> float:
    plan, others = one.candidate.plan, other.candidate.plan
    axes = sum(apart for name, apart in _OTHER_AXIS.items() if getattr(plan, name) != getattr(others, name))
    return abs(log(one.tokens_at_once / other.tokens_at_once)) + axes
