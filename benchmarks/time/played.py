"""Recorded steps beside what is said of them when each of their operations is counted on a ghost and priced alone.

The networks are the recorded ones, by the installed libraries.  Steps of compiled layers, and of optimizers or
quantization that are not installed, are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, quantiles
from typing import Any, Final

from benchmarks.gpu.recorded import asked, card

from tonnage.cluster import Cluster
from tonnage.errors import TonnageError
from tonnage.timing.replay import Pace, replay_step
from tonnage.timing.software import software_of
from tonnage.trace.operations import StepOperations
from tonnage.workers.worker import Worker

GRID: Final[dict[str, tuple[float, ...]]] = {
    "passing": (1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3),
    "kernel_seconds": (1.8e-5, 2.0e-5, 2.2e-5, 2.4e-5),
    "again_seconds": (0.0, 2e-4, 4e-4, 6e-4, 8e-4),
    "updating": (0.9, 0.95, 1.0, 1.05, 1.1),
    "expert": (1.3, 1.5, 1.7, 1.9, 2.1, 2.3),
}
"""What is tried of a pace, one after the other; products and attention are what kernels say (`kinds`)."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A recorded step, and its operations on a ghost."""

    case: str
    cluster: Cluster
    measured_seconds: float
    worked: StepOperations

    def error(self, pace: Pace) -> float:
        """Predicted / measured - 1."""
        return (
            replay_step(self.worked, self.cluster, software_of("tonnage"), pace).step_seconds / self.measured_seconds
            - 1
        )


def seen(path: Path) -> Iterator[Seen | str]:
    """Every timed step of a recording, or why it was left out."""
    with Worker() as worker, path.open() as file:
        for record in map(json.loads, file):
            if record.get("timing"):
                yield _counted(record, worker)


def _counted(record: dict[str, Any], worker: Worker) -> Seen | str:
    job, plan = asked(record)
    if plan.compile != "none" or plan.optimizer_offload != "none" or plan.param_offload != "none":
        return f"{record['case']}: compiled, or updated on the host"
    try:
        worked = worker.count_operations(job, plan, card(record))
    except TonnageError as error:
        return f"{record['case']}: {error}"
    seconds = record["timing"]["median_seconds"]
    return Seen(case=record["case"], cluster=card(record), measured_seconds=seconds, worked=worked)


def calibrated(steps: Sequence[Seen]) -> Pace:
    """The pace of the grid that is least off, with the interval that holds 8 of 10 of these steps."""
    best = Pace.usual()
    for _ in range(2):
        for name, values in GRID.items():
            tried = [replace(best, **{name: value}) for value in values]  # type: ignore[arg-type]
            best = min(tried, key=lambda pace: mean(abs(step.error(pace)) for step in steps))
    measured = quantiles([1 / (1 + step.error(best)) for step in steps], n=10)
    return replace(best, low_factor=round(measured[0], 2), high_factor=round(measured[-1], 2))


def toml(pace: Pace) -> Iterator[str]:
    """Its table in times.toml."""
    yield "[pace]"
    for name, value in asdict(pace).items():
        yield f"{name} = {json.dumps(value)}"


def table(steps: Iterable[Seen], pace: Pace) -> Iterator[str]:
    """A line for each step."""
    yield "| step | measured s | predicted, % off |"
    yield "|---|---:|---:|"
    for step in steps:
        yield f"| {step.case} | {step.measured_seconds:.4f} | {100 * step.error(pace):+.1f} |"
