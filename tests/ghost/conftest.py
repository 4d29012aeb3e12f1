"""Runs programs on the ghost; each distinct run once a session."""

import contextlib
import functools
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tonnage import dryrun
from tonnage.device import parse_cluster
from tonnage.errors import GhostUnavailable, TonnageError
from tonnage.ghost import process, wheel
from tonnage.ghost.pool import Worker
from tonnage.ghost.wheel import Torch
from tonnage.summary import Run

PROGRAMS = Path(__file__).parents[1] / "programs"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a dry-run gave."""

    run: Run | None
    """The Estimate and Traces; None when it failed."""
    error: TonnageError | None
    """Why it failed."""
    said: tuple[dict[str, Any], ...]
    """The JSON lines that the program printed."""
    output: str
    """Everything it printed."""

    def __post_init__(self) -> None:
        assert (self.run is None) != (self.error is None)


@pytest.fixture(scope="session")
def torch_build() -> Torch:
    """The CUDA build of torch; skips where a ghost cannot run, and only there."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("a ghost needs Linux on x86-64")
    try:
        found = wheel.find(sys.executable)
    except GhostUnavailable as reason:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(reason))
    process.libraries(found.cuda_major)  # raises with the command that builds them
    return found


@pytest.fixture(scope="session")
def worker(torch_build: Torch) -> Iterator[Worker]:
    """One warm worker for all estimates."""
    with Worker() as warm:
        yield warm


class DryRun:
    """`dry_run(program, *arguments, gpu=..., ...)`: an Answer, remembered as long as the session lives."""

    @functools.cache  # noqa: B019
    def __call__(
        self,
        program: str,
        *arguments: str,
        gpu: str = "a100-40gb",
        steps: int = 3,
        launcher: tuple[str, ...] = (sys.executable,),
        rank: int | None = None,
        timeout_seconds: float = 240.0,
        variables: tuple[tuple[str, str], ...] = (),
    ) -> Answer:
        command = [*launcher, str(PROGRAMS / program), *arguments]
        run, error = None, None
        with stderr_into() as heard:
            try:
                run = dryrun.run(
                    command,
                    parse_cluster(gpu),
                    steps=steps,
                    rank=rank,
                    timeout_seconds=timeout_seconds,
                    variables={**os.environ, "OMP_NUM_THREADS": "1", **dict(variables)},
                )
            except TonnageError as reason:
                error = reason
        output = heard.read_text(errors="replace")
        heard.unlink()
        return Answer(run=run, error=error, said=json_objects(output), output=output)


@pytest.fixture(scope="session")
def dry_run(torch_build: Torch) -> DryRun:
    """Runs a program of tests/programs on the ghost."""
    return DryRun()


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
