"""Seconds of a step whose layers run again in part: between those of the same step with nothing and all of it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from tonnage.costs.timing import Timing

_CARD: Final = ("compute_seconds", "recompute_seconds", "bubble_seconds", "optimizer_seconds", "copy_seconds")


def blended(none: Timing, full: Timing, selective: Timing, run_again: Mapping[str, Any]) -> Timing:
    """The Timing of a step of which `run_again` (see techniques.budget.summary) says how much runs again.

    The card's seconds follow the part of a full repetition's seconds that runs; exchanges follow the layers that run
    again at all, however little; the host's the layers in which each operation is looked at, as `selective` does.
    """
    part = float(run_again["seconds_fraction"])
    again = run_again["layers_again"] / run_again["layers"]
    looked_at = run_again["layers_in_part"] / run_again["layers"]

    def between(name: str, share: float) -> float:
        less, more = float(getattr(none, name)), float(getattr(full, name))
        return less + share * (more - less)

    host = between("host_seconds", part)
    host += looked_at * max(selective.host_seconds - max(none.host_seconds, full.host_seconds), 0.0)
    seconds: dict[str, Any] = {name: between(name, part) for name in _CARD}
    seconds |= {"communication_seconds": between("communication_seconds", again), "host_seconds": host}
    step = sum(seconds.values())
    nearer = full if part > 1 / 2 else none
    return replace(
        none,
        **seconds,
        step_seconds=step,
        low_seconds=step * none.low_seconds / none.step_seconds,
        high_seconds=step * none.high_seconds / none.step_seconds,
        tokens_per_second_per_gpu=none.tokens_per_second_per_gpu * none.step_seconds / step,
        mfu=none.mfu * none.step_seconds / step,
        bound_by=nearer.bound_by,
    )
