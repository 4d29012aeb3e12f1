"""Timings that are made of other Timings.

- `blend_recomputation`: a step that runs a part of its layers again, between a step with none and one with all
- `padded_lengths`, `average_steps`: steps whose batches have different lengths, as their mean
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from statistics import mean
from typing import Any, Final

from tonnage.timing.timing import Timing

_CARD: Final = ("compute_seconds", "recompute_seconds", "bubble_seconds", "optimizer_seconds", "copy_seconds")


def blend_recomputation(
    without: Timing, with_full: Timing, selective: Timing, run_again: Mapping[str, Any]
) -> Timing:
    """Return the Timing of a step that runs a part of its layers again in backward.

    `without`, `with_full` and `selective` are Timings of the same step without recomputation, with full and with
    selective recomputation.  `run_again` describes the part (`techniques.budget.summary`).  It lies between the first
    two:

    - seconds of the card: by the part of a full repetition's seconds
    - exchanges: by the number of layers that run again, even if only a part of a layer does
    - seconds of the host: as those of the card, and more for layers in which Python decides for each operation, as
      `selective` does
    """
    part = float(run_again["seconds_fraction"])
    again = run_again["layers_again"] / run_again["layers"]
    decided = run_again["layers_in_part"] / run_again["layers"]

    def between(name: str, share: float) -> float:
        less, more = float(getattr(without, name)), float(getattr(with_full, name))
        return less + share * (more - less)

    host = between("host_seconds", part)
    host += decided * max(selective.host_seconds - max(without.host_seconds, with_full.host_seconds), 0.0)
    seconds: dict[str, Any] = {name: between(name, part) for name in _CARD}
    seconds |= {"communication_seconds": between("communication_seconds", again), "host_seconds": host}
    step = sum(seconds.values())
    nearer = with_full if part > 1 / 2 else without
    return replace(
        without,
        **seconds,
        step_seconds=step,
        low_seconds=step * without.low_seconds / without.step_seconds,
        high_seconds=step * without.high_seconds / without.step_seconds,
        tokens_per_second_per_gpu=without.tokens_per_second_per_gpu * without.step_seconds / step,
        mfu=without.mfu * without.step_seconds / step,
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
