"""Timings made of other Timings: layers that run again in part, and batches of different lengths."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from statistics import mean
from typing import Any, Final

from tonnage.timing.timing import Timing

_CARD: Final = ("compute_seconds", "recompute_seconds", "bubble_seconds", "optimizer_seconds", "copy_seconds")


def blend_recomputation(none: Timing, full: Timing, selective: Timing, run_again: Mapping[str, Any]) -> Timing:
    """Return the Timing of a step of which a part runs again, between those of no and of full recomputation.

    `run_again`: the part, see techniques.budget.summary.  The card's seconds follow the part of a full repetition's
    seconds that runs; exchanges follow the layers that run again at all, however little; the host's seconds follow
    the layers in which Python decides for each operation, as `selective` does.
    """
    part = float(run_again["seconds_fraction"])
    again = run_again["layers_again"] / run_again["layers"]
    decided = run_again["layers_in_part"] / run_again["layers"]

    def between(name: str, share: float) -> float:
        less, more = float(getattr(none, name)), float(getattr(full, name))
        return less + share * (more - less)

    host = between("host_seconds", part)
    host += decided * max(selective.host_seconds - max(none.host_seconds, full.host_seconds), 0.0)
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
"""Groups of drawn lengths; each length counts as the mean of its group."""


def padded_lengths(lengths: Sequence[int], longest: int, sequences: int) -> dict[float, float]:
    """Return the padded lengths of micro-batches of so many sequences, each with its probability.

    `lengths` are drawn with equal probability.  A micro-batch is padded to its longest sequence; none is longer than
    `longest`.
    """
    drawn = sorted(min(length, longest) for length in lengths)
    each = -(-len(drawn) // _GROUPS)
    padded: dict[float, float] = {}
    below = 0
    for group in (drawn[start : start + each] for start in range(0, len(drawn), each)):
        upto = below + len(group)
        probability = (upto / len(drawn)) ** sequences - (below / len(drawn)) ** sequences
        padded[mean(group)] = padded.get(mean(group), 0.0) + probability
        below = upto
    return padded


def average_steps(steps: Mapping[Timing, float], filled: float) -> Timing:
    """Return the mean Timing of steps with probabilities; `filled`: the part of their tokens that is no padding."""

    def average(name: str) -> float:
        return sum(probability * float(getattr(step, name)) for step, probability in steps.items())

    longest = max(steps, key=lambda step: step.step_seconds)
    seconds: dict[str, Any] = {
        item.name: average(item.name) for item in fields(Timing) if item.name.endswith("_seconds")
    }
    whole = seconds["step_seconds"]
    tokens = sum(often * step.tokens_per_second_per_gpu * step.step_seconds for step, often in steps.items())
    used = sum(often * step.mfu * step.step_seconds for step, often in steps.items())
    return replace(longest, **seconds, tokens_per_second_per_gpu=filled * tokens / whole, mfu=filled * used / whole)
