"""Learning rates over a run, as factors of the largest one: pure functions of the number of steps that are done.

cosine    warm-up, then half a cosine down to a tenth
wsd       warm-up, stable, then a straight line to zero over the last steps (warm-up-stable-decay)
constant  warm-up, then no change
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

FLOOR: Final = 0.1
"""Factor at the end of a cosine."""

WARMUP_SHARE: Final = 0.03
"""Share of the steps that warm up by default."""

DECAY_SHARE: Final = 0.1
"""Share of the steps in which `wsd` decays by default."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Numbers of steps of a run's parts."""

    total: int
    """All steps."""
    warmup: int
    """Steps in which the rate grows from nearly zero."""
    decay: int
    """Last steps, in which `wsd` lowers the rate."""


def make_lengths(total: int, warmup: int | None = None, decay: int | None = None) -> Lengths:
    """Return the lengths of a run's parts, with the usual shares for those that are not given."""
    return Lengths(
        total=total,
        warmup=round(total * WARMUP_SHARE) if warmup is None else warmup,
        decay=max(1, round(total * DECAY_SHARE)) if decay is None else decay,
    )


def cosine(done: int, lengths: Lengths) -> float:
    """Return the factor of warm-up and half a cosine."""
    if done < lengths.warmup:
        return _warm_up(done, lengths)
    part = (done - lengths.warmup) / max(1, lengths.total - lengths.warmup)
    return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * min(1.0, part))) / 2


def warmup_stable_decay(done: int, lengths: Lengths) -> float:
    """Return the factor of warm-up, a stable part, and a straight line to zero, which is reached after the end."""
    left = max(0, lengths.total - done)
    return min(_warm_up(done, lengths), left / lengths.decay if lengths.decay else 1.0, 1.0)


def constant(done: int, lengths: Lengths) -> float:
    """Return the factor of warm-up and a stable part."""
    return min(_warm_up(done, lengths), 1.0)


def _warm_up(done: int, lengths: Lengths) -> float:
    """Return the factor of the warm-up, in which the first step already trains."""
    return (done + 1) / lengths.warmup if lengths.warmup else 1.0


SCHEDULES: Final[Mapping[str, Callable[[int, Lengths], float]]] = {
    "cosine": cosine,
    "wsd": warmup_stable_decay,
    "constant": constant,
}
"""The schedules by the words of `--schedule`."""
