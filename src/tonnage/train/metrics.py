"""Metrics of a run: a line of JSON a step in `metrics.jsonl`, and the same for TensorBoard or Weights & Biases."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from tonnage.errors import UnwritableFile, UsageError
from tonnage.files import write_text

FILE: Final = "metrics.jsonl"
LOGS: Final = ("tensorboard", "wandb")
"""Libraries that `--log` takes; each is imported only if it is named."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """The metrics of one step; numbers that a device or step does not have are None."""

    step: int
    """Number of the step; the first is 1."""
    loss: float | None
    """Mean loss over all labels of the step; None if it is not finite."""
    tokens: int
    """Labels of the step, over all ranks."""
    learning_rate: float
    """Learning rate of the first group of parameters."""
    gradient_norm: float | None
    """Norm of the gradients before clipping, under a plan that clips."""
    skipped: bool
    """True if the weights were left as they are."""
    step_seconds: float
    """Seconds of the step, with its batches, without evaluation and saving."""
    tokens_per_second: float
    """`tokens` by `step_seconds`."""
    mfu: float | None
    """Share of the device's peak FLOP/s that the step used, by the work that was predicted."""
    allocated_bytes: int | None
    """Peak of allocated memory since the run began, on the first rank."""
    reserved_bytes: int | None
    """Peak of reserved memory since the run began, on the first rank."""
    predicted_allocated_bytes: int | None
    """The same as estimated."""
    predicted_reserved_bytes: int | None
    """The same as estimated."""
    evaluation_loss: float | None = None
    """Mean loss of the evaluation after this step; None if there was none."""


class Metrics:
    """Writes lines as a run goes on, each at once."""

    def __init__(self, folder: Path, *, done: int, logs: Sequence[str]) -> None:
        """Continue the folder's metrics after the step `done`; what was written after it is removed."""
        check_logs(logs)
        self.path = folder / FILE
        kept = _lines_until(self.path, done)
        write_text(self.path, "".join(kept))
        self._sinks = [_SINKS[name](folder, done) for name in logs]

    def read_losses(self) -> list[float]:
        """Return the losses of all steps that are numbers, those before a resume included."""
        values = (json.loads(line)["loss"] for line in self.path.read_text(encoding="utf-8").splitlines())
        return [loss for loss in values if loss is not None]

    def write(self, line: Line) -> None:
        """Append a line."""
        numbers = asdict(line)
        finite = {name: None if _is_not_finite(value) else value for name, value in numbers.items()}
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(finite) + "\n")
        except OSError as error:
            raise UnwritableFile(f"{self.path} cannot be written ({error.strerror or error}).") from error
        for sink in self._sinks:
            sink(
                {name: float(value) for name, value in finite.items() if value is not None and name != "step"},
                line.step,
            )


def check_logs(logs: Sequence[str]) -> None:
    """Raise UsageError for a library that is unknown or not installed."""
    for name in logs:
        if name not in LOGS:
            raise UsageError(f"--log {name} is unknown; possible: {', '.join(LOGS)}.")
        if find_spec(name) is None:
            raise UsageError(f"--log {name} needs the package {name}, which is not installed: pip install {name}.")


def _lines_until(path: Path, done: int) -> list[str]:
    """Return the whole lines of a file up to the step `done`."""
    if not path.exists():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            is_kept = line.endswith("\n") and json.loads(line)["step"] <= done
        except (ValueError, KeyError, TypeError):
            is_kept = False
        if is_kept:
            kept.append(line)
    return kept


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


_Sink = Callable[[dict[str, float], int], None]


def _make_tensorboard(folder: Path, done: int) -> _Sink:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)

    def write(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return write


def _make_wandb(folder: Path, done: int) -> _Sink:
    import wandb

    own_id = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    run = wandb.init(id=own_id, name=folder.name, dir=str(folder), resume="allow")

    def write(values: dict[str, float], step: int) -> None:
        run.log(values, step=step)

    return write


_SINKS: Final = {"tensorboard": _make_tensorboard, "wandb": _make_wandb}
