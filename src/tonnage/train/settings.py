"""The options of `tonnage train`, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tonnage.errors import UsageError
from tonnage.train import schedules
from tonnage.train.metrics import check_logs

_SEEDS: Final = 2**63
"""Number of the seeds that torch takes."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of a run."""

    plan: Path
    """The plan file."""
    model: str
    """A model's folder, or a configuration."""
    data: Path
    """A file or folder to train on."""
    out: Path
    """The folder of the run."""
    max_steps: int | None = None
    """Steps of the run; None: as many as the epochs have."""
    epochs: float | None = None
    """Epochs of the run; None: one, or as many as the steps need."""
    lr: float | None = None
    """Largest learning rate; None: see `setup.USUAL_RATES`."""
    schedule: str = "cosine"
    """One of `schedules.SCHEDULES`."""
    warmup_steps: int | None = None
    """Steps of warm-up; None: a usual share."""
    decay_steps: int | None = None
    """Last steps in which `wsd` decays; None: a usual share."""
    weight_decay: float | None = None
    """Weight decay; None: the optimizer's own."""
    seed: int = 0
    """Decides random weights, the order of the data, and dropout."""
    tokenizer: Path | None = None
    """A tokenizer's folder; None: the model's own, or bytes."""
    eval_data: Path | None = None
    """A file or folder to evaluate on; None: a share of the data."""
    eval_every: int | None = None
    """Steps from one evaluation to the next; None: none."""
    eval_share: float = 0.01
    """Share of the sequences that is held out for evaluation without `eval_data`."""
    save_every: int = 500
    """Steps from one checkpoint to the next; the last step has one too."""
    keep: int = 2
    """Last checkpoints that are kept, beside the best one."""
    spike_sigmas: float = 6.0
    """Standard deviations above the usual loss at which a step is left out; 0: never."""
    logs: tuple[str, ...] = ()
    """Further libraries that get the metrics."""
    resume: bool = False
    """True to continue the run of the folder."""

    def __post_init__(self) -> None:
        """Check the numbers and words.  Raises UsageError."""
        for name in ("max_steps", "epochs", "eval_every", "save_every", "keep"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"--{name.replace('_', '-')} is {value}; it must be a number above zero.")
        for name in ("lr", "warmup_steps", "decay_steps", "weight_decay", "spike_sigmas", "seed"):
            value = getattr(self, name)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise UsageError(f"--{name.replace('_', '-')} is {value}; it must be a number of at least 0.")
        if self.seed >= _SEEDS:
            raise UsageError(f"--seed is {self.seed}; it must be less than 2^63.")
        if not 0 < self.eval_share < 1:
            raise UsageError(f"--eval-share is {self.eval_share}; it must be between 0 and 1.")
        if self.schedule not in schedules.SCHEDULES:
            raise UsageError(f"--schedule {self.schedule} is unknown; possible: {', '.join(schedules.SCHEDULES)}.")
        check_logs(self.logs)
