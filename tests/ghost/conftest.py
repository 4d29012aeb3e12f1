"""Runs programs on the ghost; each distinct run once a session."""

import contextlib
import fcntl
import hashlib
import json
import os
import pickle
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from commands import SOON
from tonnage.catalog.devices import parse_cluster
from tonnage.errors import TonnageError
from tonnage.estimates.from_traces import Run
from tonnage.ghost.wheel import Torch
from tonnage.script import dry_run as dry_run_module
from tonnage.serving.lengths import Lengths

PROGRAMS = Path(__file__).parents[1] / "programs"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a dry-run gave."""

    run: Run | None
    """The Estimate and Traces; None when it failed."""
    error: TonnageError | None
    """Why it failed."""
    printed: tuple[dict[str, Any], ...]
    """The JSON lines that the program printed."""
    output: str
    """Everything it printed."""

    def __post_init__(self) -> None:
        assert (self.run is None) != (self.error is None)


class DryRun:
    """`dry_run(program, *arguments, gpu=..., ...)`: an Answer, kept as long as the session lives.

    Several processes of pytest's share it: which of them has the file that asks second is not known before.
    """

    def __init__(self, kept: Path) -> None:
        self._kept = kept

    def __call__(self, program: str, *arguments: str, **how: Any) -> Answer:
        asked = repr((program, arguments, sorted(how.items())))
        place = self._kept / hashlib.sha256(asked.encode()).hexdigest()
        with place.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.exists():
                place.write_bytes(pickle.dumps(vars(_run(program, *arguments, **how))))
        return Answer(**pickle.loads(place.read_bytes()))


def _run(
    program: str,
    *arguments: str,
    gpu: str = "a100-40gb",
    steps: int = 3,
    launcher: tuple[str, ...] = (sys.executable,),
    rank: int | None = None,
    timeout_seconds: float = 240.0,
    variables: tuple[tuple[str, str], ...] = (),
    seconds: bool = False,
    requests: Lengths | None = None,
) -> Answer:
    """Runs a program of tests/programs on the ghost."""
    command = [*launcher, str(PROGRAMS / program), *arguments]
    done, error = None, None
    with stderr_into() as heard:
        try:
            done = dry_run_module.run(
                command,
                parse_cluster(gpu),
                steps=steps,
                rank=rank,
                timeout_seconds=timeout_seconds,
                variables={**os.environ, "OMP_NUM_THREADS": "1", **SOON, **dict(variables)},
                seconds=seconds,
                requests=requests,
            )
        except TonnageError as reason:
            error = reason
    output = heard.read_text(errors="replace")
    heard.unlink()
    return Answer(run=done, error=error, printed=json_objects(output), output=output)


@pytest.fixture(scope="session")
def dry_run(torch_build: Torch, whole_session: Path) -> DryRun:
    """Runs a program of tests/programs on the ghost; each distinct run once a session."""
    (whole_session / "dry-runs").mkdir(exist_ok=True)
    return DryRun(whole_session / "dry-runs")


@pytest.fixture(scope="session")
def whole_session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this session of pytest's have."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@contextlib.contextmanager
def stderr_into() -> Iterator[Path]:
    """What this process's children write to standard error goes into a file."""
    with tempfile.NamedTemporaryFile(prefix="heard-", delete=False) as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield Path(file.name)
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def json_objects(output: str) -> tuple[dict[str, Any], ...]:
    """The JSON objects in it, wherever they stand: ranks that write at the same moment share lines."""
    decoder, found, start = json.JSONDecoder(), [], output.find('{"')
    while start >= 0:
        end = start + 1
        with contextlib.suppress(ValueError):
            said, end = decoder.raw_decode(output, start)
            found.append(said)
        start = output.find('{"', end)
    return tuple(found)
