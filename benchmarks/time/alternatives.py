"""Several plans to try: each the one that is expected to add most to the best of those before it.

Plans that differ little are one bet: where the model is wrong about one it is wrong about the other.  So what a
plan may turn out to be is drawn many times, with errors that are alike as far as plans share what causes them, and
the set is built one by one such that the mean of its best is highest (for this kind of gain, building a set so
reaches at least 1 - 1/e of what the best set does: Nemhauser, Wolsey and Fisher 1978, doi:10.1007/BF01588971).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import exp, sqrt
from random import Random
from statistics import NormalDist
from typing import Final

ERROR: Final = 0.12
"""Standard deviation of the logarithm of measured / predicted seconds of layouts of one network on one number of
GPUs, those up to 1.6 times as slow as the fastest: 171 layouts of nanotron's 1 B, with constants of 80 B alone."""

SURE: Final = 0.9
"""Chance to run that a plan beyond the first should have: it is there in case the first disappoints."""

_DRAWS: Final = 1000
"""Of each plan."""

_NORMAL: Final = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """What a plan may turn out to be."""

    speed: float
    """What the model says, in any unit."""
    runs: float = 1.0
    """The chance that it runs at all."""
    stalls: float = 0.0
    """The chance that it has `stalled_speed` instead."""
    stalled_speed: float = 0.0
    """In the same unit."""
    shared: tuple[tuple[Hashable, float], ...] = ()
    """Causes of the model's error that it has in common with all plans that name the same, each with its part of the
    error's variance."""

    @property
    def expected(self) -> float:
        """Its speed on average."""
        return self.runs * ((1 - self.stalls) * self.speed + self.stalls * self.stalled_speed)


def best_set(prospects: Sequence[Prospect], count: int, *, error: float = ERROR) -> tuple[int, ...]:
    """Places of up to `count` plans, the one with the highest expected speed first.

    Beyond it those that run with a chance of at least SURE, then the others.
    """
    if not prospects or count < 1:
        return ()
    drawn = _drawn(prospects, error)
    picks = [max(range(len(prospects)), key=lambda place: prospects[place].expected)]
    best = drawn[picks[0]]
    while len(picks) < min(count, len(prospects)):
        left = [place for place in range(len(prospects)) if place not in picks]
        sure = [place for place in left if prospects[place].runs >= SURE]
        pick = max(sure or left, key=lambda place: sum(map(max, drawn[place], best)))
        picks.append(pick)
        best = list(map(max, drawn[pick], best))
    return tuple(picks)


def _drawn(prospects: Sequence[Prospect], error: float) -> list[list[float]]:
    """Speeds that each plan may turn out to have; the same plans get the same every time."""
    random = Random(0)
    causes: dict[Hashable, list[float]] = {}
    found = []
    for one in prospects:
        for cause, _ in one.shared:
            if cause not in causes:
                causes[cause] = _normal(random)
        common = [(causes[cause], sqrt(part)) for cause, part in one.shared]
        common.append((_normal(random), sqrt(1 - sum(part for _, part in one.shared))))
        speeds = []
        for draw, (stalls, runs) in enumerate(zip(_even(random), _even(random), strict=True)):
            off = sum(size * drawn[draw] for drawn, size in common)
            speed = one.stalled_speed if stalls < one.stalls else one.speed
            speeds.append(speed * exp(-error * off) if runs < one.runs else 0.0)
        found.append(speeds)
    return found


def _even(random: Random) -> list[float]:
    """Numbers between 0 and 1 at equal distances, in any order: a rare chance is met as often as it should be."""
    return [(place + 0.5) / _DRAWS for place in random.sample(range(_DRAWS), _DRAWS)]


def _normal(random: Random) -> list[float]:
    """As many from the normal distribution."""
    return [_NORMAL.inv_cdf(part) for part in _even(random)]
