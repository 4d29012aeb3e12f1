"""The progress of a run on standard error: one line that is redrawn on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from tonnage.printable import make_printable, unfiltered
from tonnage.units import format_gib

if TYPE_CHECKING:
    from tonnage.train.metrics import Line

_SECONDS_BETWEEN_LINES: Final = 5.0
_HEIGHTS: Final = "▁▂▃▄▅▆▇█"
_BARS: Final = 60
_FEWEST_STEPS: Final = 10


def describe(line: Line, *, total: int, seconds_left: float, capacity_bytes: int | None) -> str:
    """Return a step's metrics as people read them."""
    loss = "no number" if line.loss is None else f"{line.loss:.4f}"
    parts = [
        f"step {line.step}/{total}",
        f"loss {loss}{' (skipped)' if line.skipped else ''}",
        f"lr {line.learning_rate:.2e}",
        f"{line.tokens_per_second:,.0f} tokens/s",
    ]
    if line.mfu is not None:
        parts.append(f"MFU {line.mfu:.0%}")
    if line.reserved_bytes is not None:
        parts.append(_describe_memory(line.reserved_bytes, line.predicted_reserved_bytes, capacity_bytes))
    if line.evaluation_loss is not None:
        parts.append(f"evaluation {line.evaluation_loss:.4f}")
    parts.append(f"{format_duration(seconds_left)} left")
    return "  ".join(parts)


def _describe_memory(reserved: int, predicted: int | None, capacity: int | None) -> str:
    text = f"peak {format_gib(reserved)}"
    if predicted:
        text += f" ({reserved / predicted - 1:+.1%} of predicted)"
    if capacity is not None:
        text += f", {format_gib(capacity - reserved)} free"
    return text


def draw_curve(losses: Sequence[float]) -> str | None:
    """Return the losses of a run as a line of bars, each the mean of equally many steps; None for few steps.

    The lowest bar is the smallest mean and the highest one the largest: `▇▅▃▂▁`.
    """
    if len(losses) < _FEWEST_STEPS:
        return None
    count = min(_BARS, len(losses))
    edges = [len(losses) * index // count for index in range(count + 1)]
    means = [fmean(losses[begin:end]) for begin, end in pairwise(edges)]
    lowest, spread = min(means), max(means) - min(means)
    return "".join(_HEIGHTS[round((mean - lowest) / (spread or 1) * (len(_HEIGHTS) - 1))] for mean in means)


def format_duration(seconds: float) -> str:
    """Return a time as hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


class Pace:
    """Seconds that are left: the mean of a step since the first one, with the evaluations and saves between steps.

    The first step, which also loads kernels and compiles, counts only until there is a second one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[int, float] | None = None

    def seconds_left(self, step: int, total: int, step_seconds: float) -> float:
        """Return the seconds from the end of this step, which took `step_seconds`, to that of the last one."""
        now = self._clock()
        if self._first is None:
            self._first = step, now
        first, then = self._first
        each = (now - then) / (step - first) if step > first else step_seconds
        return each * (total - step)


class Progress:
    """Shows lines and remarks; a rank other than the first shows nothing."""

    def __init__(self, *, shows: bool) -> None:
        self._shows = shows
        self._live: Any = None
        self._last = -_SECONDS_BETWEEN_LINES
        if shows and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live("", console=Console(file=unfiltered(sys.stderr)), transient=True, auto_refresh=False)
            self._live.start()

    def remark(self, text: str) -> None:
        """Show a line that stays."""
        if self._live is not None:
            self._live.console.print(make_printable(text), markup=False, highlight=False)
        elif self._shows:
            print(text, file=sys.stderr, flush=True)

    def show(self, text: str, *, always: bool = False) -> None:
        """Show the state of the run; without a terminal only from time to time, or `always`."""
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text(make_printable(text)), refresh=True)
        elif self._shows and (always or time.monotonic() - self._last >= _SECONDS_BETWEEN_LINES):
            self._last = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the line that is redrawn."""
        if self._live is not None:
            self._live.stop()
