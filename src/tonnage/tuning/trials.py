"""Trials as processes: started, watched, ended together, and remembered in a file so that tuning can go on later."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tonnage.cluster import CPU
from tonnage.errors import UnreadableFile, UsageError
from tonnage.files import make_folder, read_text
from tonnage.ghost.termination import ends_with
from tonnage.techniques import environment
from tonnage.tuning.outcome import Outcome, worst

if TYPE_CHECKING:
    from tonnage.cluster import Cluster
    from tonnage.planner.solution import Candidate

RECORDS: Final = "trials.jsonl"
_OWN: Final = ".trial-"
"""How the names of the trials' own folders begin."""
_MOST_BYTES: Final = 1 << 26
_LAST_LINES: Final = 40
"""Lines of a trial's output in which an error that it caught itself is looked for."""
_LOOK_SECONDS: Final = 0.05
_GRACE_SECONDS: Final = 10.0
"""How long ranks may take to end after another's verdict."""


class Records:
    """The trials of a folder, a line each in a file, so that a second run starts none of them again."""

    def __init__(self, folder: Path) -> None:
        _check_folder(folder)
        self.folder = folder
        self._known = _read(folder / RECORDS)

    def find(self, trial: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the record of an earlier trial."""
        return self._known.get(json.dumps(trial, sort_keys=True))

    def add(self, trial: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """Add what a trial gave, and write it at once."""
        record = {"trial": trial, **found}
        self._known[json.dumps(trial, sort_keys=True)] = record
        _end_last_line(self.folder / RECORDS)
        with (self.folder / RECORDS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())


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
        self._cluster = cluster
        self._steps, self._timeout_seconds = steps, timeout_seconds
        self._variables = dict(os.environ if variables is None else variables)
        self._records = Records(folder)

    def known(self, candidate: Candidate) -> Outcome | None:
        """Return the outcome of an earlier trial."""
        found = self._records.find(self._key(candidate))
        return None if found is None else Outcome.from_json(found["outcome"])

    def run(self, candidate: Candidate) -> Outcome:
        """Return what a trial gave, from the file or from new processes; it is added to the file."""
        earlier = self.known(candidate)
        if earlier is not None:
            return earlier
        outcome = self._start(candidate)
        self._records.add(self._key(candidate), {"outcome": outcome.to_json()})
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

    def _key(self, candidate: Candidate) -> dict[str, Any]:
        return {**self._spec(candidate), "card": str(self._cluster)}

    def _start(self, candidate: Candidate) -> Outcome:
        with own_folder(self._records.folder) as own:
            spec = own / "spec.json"
            spec.write_text(json.dumps({**self._spec(candidate), "folder": str(own)}), encoding="utf-8")
            ranks = self._cluster.gpus
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            module = ["-m", "tonnage.tuning.trial", str(spec), str(own)]
            command = [sys.executable, *(launcher if ranks > 1 else []), *module]
            variables = self._variables | environment(candidate.plan)
            found, error = run_processes(command, variables, own, ranks=ranks, timeout_seconds=self._timeout_seconds)
            return error or worst([Outcome.from_json(document["outcome"]) for document in found])


@contextlib.contextmanager
def own_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder of a trial's own, which is deleted with all that the trial saved; it is locked meanwhile."""
    with (
        tempfile.TemporaryDirectory(prefix=_OWN, dir=folder, ignore_cleanup_errors=True) as own,
        _lock(Path(own)),
    ):
        yield Path(own)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[bool]:
    """Lock a folder until the block is left or this process is killed; yield False if another one has locked it.

    On Windows, which locks no folders, yield False.
    """
    if sys.platform == "win32":
        yield False
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        is_free = True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # or a file system that locks nothing: what is left there stays
            is_free = False
        yield is_free
    finally:
        os.close(handle)


def _remove_abandoned(folder: Path) -> None:
    """Delete what the trials of a tuning that was killed had saved."""
    for own in folder.glob(f"{_OWN}*"):
        with _lock(own) as is_abandoned:
            if is_abandoned:
                shutil.rmtree(own, ignore_errors=True)


def run_processes(
    command: list[str], variables: Mapping[str, str], own: Path, *, ranks: int | None, timeout_seconds: float
) -> tuple[list[dict[str, Any]], Outcome | None]:
    """Run a command until each rank has written RANK.json to the folder `own`, or one has failed, or time is over.

    Return the documents, or the outcome of processes that left none.  The number of ranks is that of the documents
    if it is None.  All processes are ended.
    """
    words = own / "words"
    with words.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=ends_with(os.getpid()) if sys.platform == "linux" else None,
        )
        try:
            found, is_late = _wait(process, own, ranks, timeout_seconds)
        finally:
            _end(process)
    if found:
        return found, None
    if is_late:
        late = f"no end after {timeout_seconds:g} s; give more with --timeout"
        return [], Outcome(ended="failed", moment="unknown", message=late)
    return [], _explain(process.returncode, words.read_text(encoding="utf-8", errors="replace"))


def _explain(code: int, words: str) -> Outcome:
    """Return the outcome of processes that ended without a word of their own."""
    if code == -signal.SIGKILL:
        killed = f"killed, as a system does that lacks host memory; it ended by {code}"
        return Outcome(ended="out_of_memory", moment="load", message=killed)
    said = words.strip().splitlines()
    is_memory = any("out of memory" in line.lower() for line in said[-_LAST_LINES:])
    last = said[-1][:300] if said else "no words"
    return Outcome(ended="out_of_memory" if is_memory else "failed", moment="load", message=f"exit {code}: {last}")


def _wait(
    process: subprocess.Popen[bytes], own: Path, ranks: int | None, timeout_seconds: float
) -> tuple[list[dict[str, Any]], bool]:
    """Return the documents of all ranks, or what there is once one of them failed and the others had time.

    The second value is True if the time was over.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        is_over = process.poll() is not None
        found = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(own.glob("[0-9]*.json"))]
        wanted = ranks or max((document["ranks"] for document in found), default=1)
        if len(found) >= wanted or is_over:
            return found, False
        if any(document["outcome"]["ended"] != "finished" for document in found):
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if time.monotonic() > deadline:
            return found, True
        time.sleep(_LOOK_SECONDS)


def _check_folder(folder: Path) -> None:
    """Make the folder, or check that only earlier trials are in it.  Raises UsageError and UnwritableFile."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if RECORDS not in names and not all(name.startswith(_OWN) for name in names):
        raise UsageError(f"--out {folder} is in use, and not by trials; name another folder.")
    make_folder(folder)
    _remove_abandoned(folder)


def _end_last_line(file: Path) -> None:
    """Delete a last line that was cut by a kill: the next record would become a part of it."""
    content = file.read_bytes() if file.exists() else b""
    begin = content.rfind(b"\n") + 1
    if begin == len(content):
        return
    try:
        json.loads(content[begin:])
        file.write_bytes(content + b"\n")
    except ValueError:
        os.truncate(file, begin)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(file: Path) -> dict[str, dict[str, Any]]:
    """Return the records in a file by their trials; a last line that was cut by a kill is left out."""
    if not file.exists():
        return {}
    known: dict[str, dict[str, Any]] = {}
    lines = read_text(file, _MOST_BYTES).splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            Outcome.from_json(record["outcome"])
            known[json.dumps(record["trial"], sort_keys=True)] = record
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise UnreadableFile(
                    f"{file}:{number} is no trial; delete the line, or give another --out."
                ) from error
    return known
