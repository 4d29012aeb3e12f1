"""Seconds and memory of the steps of a trainer that runs under a plan, beside the plan's estimate."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from tonnage.errors import UsageError
from tonnage.planner import plan_file
from tonnage.train.prediction import Estimation, Predicted

if TYPE_CHECKING:
    from tonnage.train.effects import Effect

_WARM_STEPS: Final = 2


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """Steps, seconds and memory of a planned training."""

    steps: int
    """Optimizer steps."""
    step_seconds: float | None
    """Median seconds of a step after the first ones; None for fewer steps."""
    allocated_bytes: int | None
    """Peak of torch's allocator on this rank; None on the CPU."""
    reserved_bytes: int | None
    """The same of reserved memory."""
    effects: tuple[Effect, ...]
    """Effects of the plan's options that were found after the first step."""
    predicted: Predicted = field(default_factory=Predicted)
    """The same numbers of the plan file's estimate; without numbers on the CPU and for a bare Plan."""

    def __str__(self) -> str:
        """Return one line."""
        seconds = "" if self.step_seconds is None else f", {self.step_seconds:.3g} s a step"
        seconds += _beside(self.step_seconds, self.predicted.step_seconds)
        memory = "".join(
            f", {held / 2**30:.2f} GiB {kind}{_beside(held, predicted)}"
            for kind, held, predicted in (
                ("allocated", self.allocated_bytes, self.predicted.allocated_bytes),
                ("reserved", self.reserved_bytes, self.predicted.reserved_bytes),
            )
            if held is not None
        )
        off = [effect.option for effect in self.effects if not effect.took_effect]
        missing = f"; without effect: {', '.join(off)}" if off else ""
        return f"plan: {self.steps} steps{seconds}{memory}{missing}"


def _beside(measured: float | None, predicted: float | None) -> str:
    """Return by how much a number differs from its prediction; an empty text without either."""
    return f" ({measured / predicted - 1:+.1%} of predicted)" if measured is not None and predicted else ""


class Meter:
    """Measures seconds and memory of steps, and looks once for what the plan says."""

    def __init__(self, look: Callable[[], tuple[Effect, ...]]) -> None:
        self._look = look
        self._begun: float | None = None
        self._seconds: list[float] = []
        self._effects: tuple[Effect, ...] = ()

    def begin(self) -> None:
        """Forget earlier steps and their peaks."""
        self._seconds.clear()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def begin_step(self) -> None:
        """Begin to time a step."""
        self._begun = time.perf_counter()

    def end_step(self) -> None:
        """Add a step; after the first one, look for the plan, and name what had no effect on stderr."""
        if self._begun is not None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._seconds.append(time.perf_counter() - self._begun)
        if len(self._seconds) == 1:
            self._effects = self._look()
            for effect in self._effects:
                if not effect.took_effect:
                    print(f"{effect.option} {effect.planned} had no effect: {effect.found}", file=sys.stderr)

    @property
    def report(self) -> PlanReport:
        """Return what was measured so far."""
        on_card = torch.cuda.is_available()
        steady = self._seconds[_WARM_STEPS:]
        return PlanReport(
            steps=len(self._seconds),
            step_seconds=statistics.median(steady) if steady else None,
            allocated_bytes=torch.cuda.max_memory_allocated() if on_card else None,
            reserved_bytes=torch.cuda.max_memory_reserved() if on_card else None,
            effects=self._effects,
        )


def begin_estimate(plan: str | Path) -> Estimation | None:
    """Return the running estimate of a plan file; None for a factory, whose code only its user may have run."""
    try:
        model = plan_file.read(Path(plan)).network(None)
    except UsageError as error:
        print(f"no prediction: {error}", file=sys.stderr)
        return None
    return Estimation(Path(plan), model)
