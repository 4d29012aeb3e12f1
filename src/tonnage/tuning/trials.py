"""Trials as processes: started, watched, ended together, and remembered in a file so that tuning can go on later."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tonnage.cluster import CPU
from tonnage.errors import UnreadableFile, UnwritableFile, UsageError
from tonnage.files import read_text
from tonnage.techniques import environment
from tonnage.tuning.outcome import Outcome, worst

if TYPE_CHECKING:
    from tonnage.cluster import Cluster
    from tonnage.planner.solution import Candidate

RECORDS: Final = "trials.jsonl"
_MOST_BYTES: Final = 1 << 26
_LOOK_SECONDS: Final = 0.05
_GRACE_SECONDS: Final = 10.0
"""How long ranks may take to end after another's verdict."""


class Trials:
    """Tries candidates in fresh processes; what was tried before is read from the folder's file."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        *,
        steps: int,
        timeout_seconds: float,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._cluster, self._folder = cluster, folder
        self._steps, self._timeout_seconds = steps, timeout_seconds
        self._variables = dict(os.environ if variables is None else variables)
        _check_folder(folder)
        self._known = _read(folder / RECORDS)

    def known(self, candidate: Candidate) -> Outcome | None:
        """Return the outcome of an earlier trial."""
        return self._known.get(self._key(candidate))

    def run(self, candidate: Candidate) -> Outcome:
        """Return what a trial gave, from the file or from new processes; it is added to the file."""
        earlier = self.known(candidate)
        if earlier is not None:
            return earlier
        outcome = self._start(candidate)
        key = self._key(candidate)
        self._known[key] = outcome
        with (self._folder / RECORDS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"trial": json.loads(key), "outcome": outcome.to_json()}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return outcome

    def _spec(self, candidate: Candidate) -> dict[str, Any]:
        return {
            "job": asdict(candidate.job),
            "plan": asdict(candidate.plan),
            "device": CPU if self._cluster.device.id == CPU else "cuda",
            "world_size": self._cluster.gpus,
            "gpus_per_node": self._cluster.gpus_per_node,
            "steps": self._steps,
        }

    def _key(self, candidate: Candidate) -> str:
        return json.dumps({**self._spec(candidate), "card": str(self._cluster)}, sort_keys=True)

    def _start(self, candidate: Candidate) -> Outcome:
        with tempfile.TemporaryDirectory(prefix=".trial-", dir=self._folder, ignore_cleanup_errors=True) as own:
            spec, result, words = Path(own) / "spec.json", Path(own) / "result", Path(own) / "words"
            spec.write_text(json.dumps({**self._spec(candidate), "folder": own}), encoding="utf-8")
            ranks = self._cluster.gpus
            module = ["-m", "tonnage.tuning.trial", str(spec), str(result)]
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            command = [sys.executable, *(launcher if ranks > 1 else []), *module]
            with words.open("wb") as output:
                process = subprocess.Popen(
                    command,
                    env=self._variables | environment(candidate.plan),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                try:
                    outcomes = self._wait(process, result, ranks)
                finally:
                    _end(process)
            if outcomes:
                return worst(outcomes)
            code = process.returncode
            killed = code == -signal.SIGKILL
            said = words.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            reason = (
                f"killed, as a system does that lacks host memory; it ended by {code}" if killed else f"exit {code}"
            )
            return Outcome(
                ended="out_of_memory" if killed else "failed",
                moment="load",
                message=f"{reason}: {said[-1][:300] if said else 'no words'}",
            )

    def _wait(self, process: subprocess.Popen[bytes], result: Path, ranks: int) -> list[Outcome]:
        """Return the outcomes of all ranks, or what there is once one of them failed and the others had time."""
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            is_over = process.poll() is not None
            files = [Path(f"{result}.{rank}") for rank in range(ranks)]
            outcomes = [Outcome.from_json(json.loads(file.read_text())) for file in files if file.exists()]
            if len(outcomes) == ranks or is_over:
                return outcomes
            if any(not outcome.holds for outcome in outcomes):
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            if time.monotonic() > deadline:
                late = f"no end after {self._timeout_seconds:g} s; give more with --timeout"
                return outcomes or [Outcome(ended="failed", moment="unknown", message=late)]
            time.sleep(_LOOK_SECONDS)


def _check_folder(folder: Path) -> None:
    """Make the folder, or check that only earlier trials are in it.  Raises UsageError and UnwritableFile."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / RECORDS).is_file():
        raise UsageError(f"--out {folder} is in use, and not by trials; name another folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnwritableFile(f"The folder {folder} cannot be created ({error.strerror or error}).") from error


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(file: Path) -> dict[str, Outcome]:
    """Return the outcomes in a file by their trials; a last line that was cut by a kill is left out."""
    if not file.exists():
        return {}
    known: dict[str, Outcome] = {}
    lines = read_text(file, _MOST_BYTES).splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            known[json.dumps(record["trial"], sort_keys=True)] = Outcome.from_json(record["outcome"])
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise UnreadableFile(
                    f"{file}:{number} is no trial; delete the line, or give another --out."
                ) from error
    return known
