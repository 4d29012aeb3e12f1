"""A guard against steps that harm the weights: a loss that is no number, or far above those before it.

Such a step changes no weight.  Repeated ones mean that the weights themselves are at fault, and the run goes back to
its last checkpoint, with the data after the bad steps.

    guard = Guard(sigmas=6)
    guard.accepts(loss=2.31, gradient_norm=0.8)   # True
    guard.accepts(loss=nan, gradient_norm=nan)    # False: the step is left out
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

WINDOW: Final = 64
"""Losses that a new one is compared with."""

LEAST: Final = 16
"""Losses that are needed to say what is usual."""

REPEATED: Final = 3
"""Bad steps in a row after which the run goes back."""

_SMALLEST_SPREAD: Final = 0.02
"""Standard deviation, as a part of the mean, below which losses count as equal."""


class Guard:
    """Judges each step by its loss and the norm of its gradients."""

    def __init__(self, *, sigmas: float) -> None:
        self.sigmas = sigmas
        """Standard deviations above the mean at which a loss is a spike; 0: none is, if it is finite."""
        self.losses: deque[float] = deque(maxlen=WINDOW)
        """The last losses that were accepted."""
        self.bad = 0
        """All bad steps."""
        self.bad_in_a_row = 0
        """Bad steps since the last good one, or since the run went back."""
        self.is_back = False
        """True since the run went back, until a good step: its weights are those of the checkpoint still."""

    @property
    def limit(self) -> float:
        """Return the highest loss that is accepted."""
        if not self.sigmas or len(self.losses) < LEAST:
            return math.inf
        mean = statistics.fmean(self.losses)
        return mean + self.sigmas * max(statistics.pstdev(self.losses, mean), _SMALLEST_SPREAD * abs(mean))

    def accepts(self, loss: float, gradient_norm: float | None) -> bool:
        """Return True if a step may change the weights, and remember it."""
        is_finite = math.isfinite(loss) and (gradient_norm is None or math.isfinite(gradient_norm))
        if is_finite and loss <= self.limit:
            self.losses.append(loss)
            self.bad_in_a_row, self.is_back = 0, False
            return True
        self.bad += 1
        self.bad_in_a_row += 1
        return False

    @property
    def must_go_back(self) -> bool:
        """Return True after repeated bad steps."""
        return self.bad_in_a_row >= REPEATED

    def went_back(self) -> None:
        """Begin anew with the weights of a checkpoint."""
        self.bad_in_a_row, self.is_back = 0, True

    def state(self) -> dict[str, Any]:
        """Return what a resumed run must know, as JSON has it."""
        counts = {"bad": self.bad, "bad_in_a_row": self.bad_in_a_row, "is_back": self.is_back}
        return {"losses": list(self.losses), **counts}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue as the guard that had this state."""
        self.losses = deque(state["losses"], maxlen=WINDOW)
        self.bad, self.bad_in_a_row = int(state["bad"]), int(state["bad_in_a_row"])
        self.is_back = bool(state.get("is_back"))
