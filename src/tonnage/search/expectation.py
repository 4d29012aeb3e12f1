"""What runs say of candidates that were not run: interpolation between traces.

The least memory of a candidate is known, and what runs usually need beyond it.  How much of that runs like it really
needed corrects the latter.  A look shows less than a whole run needs; by how much, whole runs of its kind say.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log
from typing import Any, Final

from tonnage.search.pricing import Priced
from tonnage.search.space import OFFLOADS

_OTHER_AXIS: Final = {"tp": 0.3, "pp": 0.3, "ep": 0.3, "cp": 0.05}
"""How far apart two runs are for a parallel dimension in which they differ, in the scale of log(tokens).

With its part of longer sequences a rank of `cp` does what it would do with shorter ones."""

_NEAR: Final = max(_OTHER_AXIS.values())
"""How far apart runs are at most that say something of one another though they divide weights otherwise: one parallel
dimension."""

_ERROR_OF_LIKE: Final = 0.02
"""Of what is expected, how far a run may be off that is like one that was made."""

_ERROR_APART: Final = 0.25
"""The same for each unit that it is apart from that one."""

_ERROR_UNKNOWN: Final = 0.4
"""The same where there was no run like it."""


@dataclass(frozen=True)
class _Seen:
    """What a run has shown."""

    one: Priced
    """Of whom."""
    need_bytes: int
    """Peak of the process; of a look without what the allocator keeps in reserve."""
    looked: bool
    """Whether only a few layers were run."""


class Expectation:
    """Runs so far, by what decides how far a need is above the least."""

    def __init__(self) -> None:
        self._runs: dict[tuple[Any, ...], list[_Seen]] = {}
        self._akin: dict[tuple[Any, ...], list[_Seen]] = {}
        self._beyond: dict[tuple[bool, ...], float] = {}

    def look(self, one: Priced, least_bytes: int) -> None:
        """Note the least that a look has shown a candidate to need."""
        self._note(_Seen(one, least_bytes, looked=True))

    def learn(self, one: Priced, need_bytes: int) -> None:
        """Note what a candidate was found to need, run whole."""
        for look in self._runs.get(_like(one), ()):
            if look.one is one and look.looked:
                beyond = need_bytes / look.need_bytes
                self._beyond[_kind(one)] = min(beyond, self._beyond.get(_kind(one), beyond))
        self._note(_Seen(one, need_bytes, looked=False))

    def _note(self, run: _Seen) -> None:
        self._runs.setdefault(_like(run.one), []).append(run)
        self._akin.setdefault(_akin(run.one), []).append(run)

    def has_seen(self, method: str) -> bool:
        """Whether anything was run of a method."""
        return any(kind[0] == method for kind in self._runs)

    def beyond(self, one: Priced, unknown: float = 1.0) -> float:
        """How many times what a look has shown whole runs of a kind took at least; `unknown` before any."""
        return self._beyond.get(_kind(one), unknown)

    def bytes(self, one: Priced) -> float:
        """What a candidate is expected to need."""
        found = self._nearest(one) or self._near_of_kin(one)
        if found is None:
            return one.least_bytes + one.beyond_bytes
        nearest = found.one
        need = found.need_bytes * (self.beyond(nearest) if found.looked else 1.0)
        return one.least_bytes + one.beyond_bytes * (need - nearest.least_bytes) / nearest.beyond_bytes

    def error(self, one: Priced) -> float:
        """By which part of it the need may be off: by any, if nothing is known of the network either."""
        found = self._nearest(one)
        if found is None:
            return _ERROR_UNKNOWN if one.least_bytes else inf
        return _ERROR_OF_LIKE + _ERROR_APART * _apart(one, found.one)

    def _nearest(self, one: Priced) -> _Seen | None:
        """The run that is most like a candidate, the latest of equally near ones."""
        runs = self._runs.get(_like(one), ())
        return min(reversed(runs), key=lambda run: _apart(one, run.one), default=None)

    def _near_of_kin(self, one: Priced) -> _Seen | None:
        """The same among runs that divide weights, gradients and states otherwise, as the least tells.

        Only of those near: how far off it is hangs on what is divided as well.
        """
        runs = [run for run in self._akin.get(_akin(one), ()) if _apart(one, run.one) <= _NEAR]
        return min(reversed(runs), key=lambda run: _apart(one, run.one), default=None)


def _like(one: Priced) -> tuple[Any, ...]:
    """What decides how far a need is above the least."""
    plan = one.candidate.plan
    return (*_akin(one), plan.shard, plan.accum_sync or one.candidate.job.grad_accum == 1)


def _akin(one: Priced) -> tuple[Any, ...]:
    """The same but for what weights, gradients and states are divided by."""
    job, plan = one.candidate.job, one.candidate.plan
    return (
        job.method,
        plan.precision,
        plan.loss,
        plan.optimizer,
        plan.checkpointing,
        plan.optimizer_in_backward,
        *(getattr(plan, name) for name in OFFLOADS),
    )


def _kind(one: Priced) -> tuple[bool, ...]:
    """What decides how much of a rank's memory a look of a few layers does not show."""
    plan = one.candidate.plan
    return (plan.pp > 1, plan.tp > 1, plan.checkpointing == "none")


def _apart(one: Priced, other: Priced) -> float:
    plan, others = one.candidate.plan, other.candidate.plan
    axes = sum(apart for name, apart in _OTHER_AXIS.items() if getattr(plan, name) != getattr(others, name))
    return abs(log(one.tokens_at_once / other.tokens_at_once)) + axes
