"""Asks questions of one version of the program and keeps what it answers.

Each question runs in a new folder with its input files, with an empty cache of traces beside the fetched torch, and
with no access to the network.  A record is a folder with one folder per question:

    record.json             which source was asked, with which versions, on how many cores
    QUESTION/answer.json    the command lines, their exit codes and seconds, and temporary folders
    QUESTION/0.out, 0.err   what each command line printed
    QUESTION/files/         what the commands wrote
"""

import json
import os
import platform
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final

from benchmarks.oracle.questions import INPUTS, Question

MOST_SECONDS: Final = 600
"""Time limit of one command line."""

_PROGRAMS: Final = {"tonnage": (sys.executable, "-m", "tonnage"), "python": (sys.executable,)}
_LEFT_OUT: Final = ("TONNAGE_", "PYTHON", "COLUMNS", "CUDA_", "PYTORCH_", "TORCH", "HF_", "XDG_CACHE_HOME")
"""Beginnings of the variables that would change an answer."""


def record(questions: Sequence[Question], folder: Path, source: Path, jobs: int = 1) -> None:
    """Ask all questions, `jobs` at a time, and write the record.

    Raises ValueError for a folder that is part of a tree or holds something else, or a source without the program.
    """
    folder, source = folder.resolve(), source.resolve()
    check(folder, source)
    folder.mkdir(parents=True, exist_ok=True)
    versions = sorted({f"{one.name} {one.version}" for one in distributions() if one.name != "tonnage"})
    facts = {
        "source": str(source),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "versions": versions,
    }
    (folder / "record.json").write_text(json.dumps(facts, indent=1))
    began, used = time.monotonic(), _processor_seconds()
    with ThreadPoolExecutor(jobs) as pool:
        for question, codes, seconds in pool.map(lambda one: _asked(one, folder / one.name, source), questions):
            print(f"{question.name:34} {seconds:6.1f} s   exit codes {codes}", flush=True)
    took, used = time.monotonic() - began, _processor_seconds() - used
    print(f"{len(questions)} questions in {took:.0f} s ({used:.0f} s of processor time), recorded in {folder}")


def _processor_seconds() -> float:
    """Return the processor time of the processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def check(folder: Path, source: Path) -> None:
    """Raise ValueError where a record cannot be made."""
    for tree in (Path(__file__).parents[2], source.parent):
        if folder.is_relative_to(tree):
            raise ValueError(f"{folder} is inside the tree {tree}; name a folder outside of it.")
    if folder.exists() and any(folder.iterdir()) and not (folder / "record.json").is_file():
        raise ValueError(f"{folder} holds something other than a record; name a new folder.")
    if not (source / "tonnage" / "__main__.py").is_file():
        raise ValueError(f"{source} holds no package tonnage; name the folder src of a checkout.")


def _asked(question: Question, kept: Path, source: Path) -> tuple[Question, list[int], float]:
    if kept.exists():
        shutil.rmtree(kept)
    kept.mkdir()
    with tempfile.TemporaryDirectory(prefix="oracle-") as home:
        place = Path(home)
        given = _lay_out(question, place)
        environment = _environment(place, source)
        ended = []
        for number, line in enumerate(question.commands):
            began = time.monotonic()
            code, out, err = _run(line, place / "work", environment)
            ended.append({"command": line, "code": code, "seconds": round(time.monotonic() - began, 2)})
            (kept / f"{number}.out").write_bytes(out)
            (kept / f"{number}.err").write_bytes(err)
        _keep_written(place / "work", kept / "files", given)
        answer = {"commands": ended, "home": home, "source": str(source)}
        (kept / "answer.json").write_text(json.dumps(answer, indent=1))
    return question, [each["code"] for each in ended], sum(each["seconds"] for each in ended)


def _lay_out(question: Question, place: Path) -> dict[Path, bytes]:
    """Make the folders of a question; return its input files with their content."""
    for name in ("work", "cache", "tmp"):
        (place / name).mkdir()
    for name in question.inputs:
        shutil.copy(INPUTS / name, place / "work" / name)
    if question.cases:
        shutil.copy(INPUTS / "asked.py", place / "work")
        (place / "work" / "cases.json").write_text(json.dumps(question.cases))
    for wheel in _cache().glob("torch-*"):
        (place / "cache" / wheel.name).symlink_to(wheel)
    return {path: path.read_bytes() for path in (place / "work").iterdir()}


def _cache() -> Path:
    """Return the cache folder of the one who records, for its fetched torch."""
    if named := os.environ.get("TONNAGE_CACHE"):
        return Path(named).resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").resolve() / "tonnage"


def _environment(place: Path, source: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_LEFT_OUT)}
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}",
        "PYTHONPATH": str(source),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "LC_ALL": "C.UTF-8",
        "NO_COLOR": "1",
        "TONNAGE_CACHE": str(place / "cache"),
        "TMPDIR": str(place / "tmp"),
    }


def _run(line: str, work: Path, environment: dict[str, str]) -> tuple[int, bytes, bytes]:
    """Run one command line; return its exit code (-1: it did not end in time), standard output and standard error."""
    program, *rest = shlex.split(line)
    process = subprocess.Popen(
        [*_PROGRAMS[program], *rest],
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        return -1, out, err
    return process.returncode, out, err


def _keep_written(work: Path, kept: Path, given: dict[Path, bytes]) -> None:
    """Copy the files that the commands wrote, or changed."""
    for path in sorted(work.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and given.get(path) != path.read_bytes():
            target = kept / path.relative_to(work)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)


def read_facts(folder: Path) -> dict[str, Any]:
    """Return what a record says of the version that was asked.  Raises ValueError for a folder that is no record."""
    try:
        return dict(json.loads((folder / "record.json").read_text()))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} is no record ({error}).") from error
