"""Seconds between those of other steps: of layers that run again in part, of batches that are unlike each other."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from statistics import mean
from typing import Any, Final

from tonnage.timing.timing import Timing

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


_GROUPS: Final = 16
"""Of drawn lengths, each of which has its mean."""


def padded_lengths(lengths: Sequence[int], longest: int, sequences: int) -> dict[float, float]:
    """How long micro-batches of so many sequences are, whose lengths are drawn alike: each length and how often.

    A micro-batch is padded to its longest sequence; none is longer than `longest`.
    """
    drawn = sorted(min(length, longest) for length in lengths)
    each = -(-len(drawn) // _GROUPS)
    found: dict[float, float] = {}
    below = 0
    for group in (drawn[start : start + each] for start in range(0, len(drawn), each)):
        reached = below + len(group)
        often = (reached / len(drawn)) ** sequences - (below / len(drawn)) ** sequences
        found[mean(group)] = found.get(mean(group), 0.0) + often
        below = reached
    return found


def averaged(found: Mapping[Timing, float], filled: float) -> Timing:
    """The Timing of steps of which each comes so often; `filled`: the part of their tokens that is no padding."""

    def average(name: str) -> float:
        return sum(often * float(getattr(one, name)) for one, often in found.items())

    longest = max(found, key=lambda one: one.step_seconds)
    seconds: dict[str, Any] = {
        item.name: average(item.name) for item in fields(Timing) if item.name.endswith("_seconds")
    }
    step = seconds["step_seconds"]
    tokens = sum(often * one.tokens_per_second_per_gpu * one.step_seconds for one, often in found.items())
    used = sum(often * one.mfu * one.step_seconds for one, often in found.items())
    return replace(longest, **seconds, tokens_per_second_per_gpu=filled * tokens / step, mfu=filled * used / step)
