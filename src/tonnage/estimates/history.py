"""Measurements of trials on this user's devices, and how far the time model was off there.

    tonnage tune llama-3.2-1b --out tuned      # measures, and remembers
    tonnage estimate llama-3.2-1b --gpu h200   # seconds are corrected, and the coverage says so

A measurement corrects estimates of the same network on the same card with the same torch: by its own ratio for the
same job and plan, else by the median of all.  The file is `history.sqlite` in the cache folder.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import statistics
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tonnage.ghost.cache_folder import cache_folder, check_private, make_private
from tonnage.units import pluralise

if TYPE_CHECKING:
    from tonnage.case import Case
    from tonnage.estimates.estimate import Estimate

_TABLE: Final = """
CREATE TABLE IF NOT EXISTS measurements (
    day TEXT NOT NULL, device TEXT NOT NULL, gpus INTEGER NOT NULL, torch TEXT NOT NULL, model TEXT NOT NULL,
    question TEXT NOT NULL, predicted_seconds REAL NOT NULL, measured_seconds REAL NOT NULL
)"""

_FASTER: Final = ("step_seconds", "low_seconds", "high_seconds")
_SLOWER: Final = ("tokens_per_second_per_gpu", "mfu")

_LARGEST_RATIO: Final = 10.0
"""A measurement further off than this says something about the machine of that day, not about the model."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """A factor for predicted seconds."""

    ratio: float
    """Measured / predicted seconds."""
    measurements: int
    """Number of measurements behind it."""
    same: bool
    """True if they are of the same job and plan."""


def file() -> Path:
    """Return the path of the history."""
    return cache_folder() / "history.sqlite"


def record(case: Case, torch_version: str, *, predicted_seconds: float, measured_seconds: float) -> None:
    """Remember what a trial of this case measured; `predicted_seconds` are those before any correction."""
    device, model, question = _keys(case)
    row = (device, case.cluster.gpus, _release(torch_version), model, question, predicted_seconds, measured_seconds)
    make_private(file().parent)
    with _connection() as history:
        history.execute(_TABLE)
        history.execute("INSERT INTO measurements VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (time.strftime("%Y-%m-%d"), *row))


def forget(case: Case) -> int:
    """Delete what was measured of this network on this card, and return the number of measurements."""
    device, model, _ = _keys(case)
    if not file().exists():
        return 0
    with _connection() as history:
        history.execute(_TABLE)
        return history.execute("DELETE FROM measurements WHERE device = ? AND model = ?", (device, model)).rowcount


def find_correction(case: Case, torch_version: str) -> Correction | None:
    """Return the correction for a case; None without measurements, or if the history cannot be read."""
    if not file().exists():
        return None
    device, model, question = _keys(case)
    try:
        with _connection() as history:
            rows = history.execute(
                "SELECT question, measured_seconds / predicted_seconds FROM measurements "
                "WHERE device = ? AND model = ? AND torch = ? AND gpus = ? AND predicted_seconds > 0",
                (device, model, _release(torch_version), case.cluster.gpus),
            ).fetchall()
    except sqlite3.Error:
        return None
    ratios = [(asked, ratio) for asked, ratio in rows if 1 / _LARGEST_RATIO < ratio < _LARGEST_RATIO]
    own = [ratio for asked, ratio in ratios if asked == question]
    taken = own or [ratio for _, ratio in ratios]
    if not taken:
        return None
    return Correction(ratio=statistics.median(taken), measurements=len(taken), same=bool(own))


def correct(estimate: Estimate, case: Case) -> Estimate:
    """Return the estimate with its seconds corrected by what was measured, and a line that says so."""
    if estimate.time.get("step_seconds") is None:
        return estimate
    torch_version = str(estimate.versions.get("torch", ""))
    correction = find_correction(case, torch_version)
    if correction is None:
        return estimate
    changed: dict[str, Any] = {"uncorrected_step_seconds": estimate.time["step_seconds"]}
    for names, factor in ((_FASTER, correction.ratio), (_SLOWER, 1 / correction.ratio)):
        changed |= {name: estimate.time[name] * factor for name in names if estimate.time.get(name) is not None}
    of_what = "of this very plan" if correction.same else "of this network"
    line = (
        f"seconds are {correction.ratio:.2f} times the time model's: {pluralise(correction.measurements, 'trial')} "
        f"{of_what} on {case.cluster.device.id} with torch {_release(torch_version)} (tonnage tune --forget ends it)"
    )
    coverage = replace(estimate.coverage, assumed=(*estimate.coverage.assumed, line))
    return replace(estimate, time={**estimate.time, **changed}, coverage=coverage)


@contextmanager
def _connection() -> Iterator[sqlite3.Connection]:
    check_private(file().parent)
    with closing(sqlite3.connect(file(), timeout=5)) as connection, connection:
        yield connection


def _keys(case: Case) -> tuple[str, str, str]:
    """Return the card, the network's structure and the question, by which measurements are found."""
    config = {name: value for name, value in case.job.model.config.items() if name != "_name_or_path"}
    structure = config or {"name": case.job.model.name}
    job = {name: value for name, value in asdict(case.job).items() if name != "model"}
    return case.cluster.device.id, _digest(structure), _digest({"job": job, "plan": asdict(case.plan)})


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _release(torch_version: str) -> str:
    """Return a version of torch without its build: `2.13.0+cu130` and `2.13.0` are the same code."""
    return torch_version.partition("+")[0]
