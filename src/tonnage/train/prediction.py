"""The estimate of a run's plan, made by a process of its own while the run loads its weights."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.errors import UsageError

if TYPE_CHECKING:
    from tonnage.case import Case


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Numbers of an estimate; None where there is none."""

    allocated_bytes: int | None = None
    """Peak of allocated memory."""
    reserved_bytes: int | None = None
    """Peak of reserved memory."""
    step_seconds: float | None = None
    """Seconds of a step."""
    mfu: float | None = None
    """Share of the device's peak FLOP/s in such a step."""

    def mfu_at(self, seconds: float) -> float | None:
        """Return the share of the peak FLOP/s of a step that took so long: it does the work that was predicted."""
        if self.mfu is None or self.step_seconds is None or seconds <= 0:
            return None
        return self.mfu * self.step_seconds / seconds


def read_estimate(document: Mapping[str, Any]) -> Predicted:
    """Return the numbers of an estimate's JSON document."""
    return Predicted(
        allocated_bytes=document["peak"]["allocated_bytes"],
        reserved_bytes=document["peak"]["reserved_bytes"],
        step_seconds=document["time"]["step_seconds"],
        mfu=document["time"]["mfu"],
    )


def predict(case: Case) -> Predicted:
    """Return the numbers of an estimate.  Raises UsageError for a network that code makes, and CannotEstimate."""
    from tonnage.estimates import predict as estimates

    if case.job.model.kind == "factory":
        raise UsageError(
            f"{case.job.model.name} has no configuration; tonnage.estimate takes a function that makes the network."
        )
    return read_estimate(estimates.answer(case).estimate.to_json())


class Estimation:
    """A running `tonnage estimate` of a plan file."""

    def __init__(self, plan: Path, model: str) -> None:
        command = [sys.executable, "-m", "tonnage", "estimate", model, "--plan", str(plan), "--json", "--no-advice"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def wait(self) -> tuple[Predicted, str]:
        """Return the numbers, and the reason why there are none or an empty text."""
        output, messages = self._process.communicate()
        try:
            return read_estimate(json.loads(output)), ""
        except (ValueError, KeyError, TypeError):
            last = (messages.strip().splitlines() or ["no reason was given"])[-1]
            return Predicted(), last.removeprefix("error: ")

    def end(self) -> None:
        """End the process, if it runs."""
        self._process.terminate()
        self._process.wait()
