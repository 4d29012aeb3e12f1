"""Takes the steps of rows on ghost cards, each job once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.accuracy import software
from benchmarks.accuracy.rows import METRICS, ROOT, Row
from benchmarks.accuracy.software import Given

from tonnage.device import Device, parse_cluster
from tonnage.errors import TonnageError
from tonnage.ghost.process import environment
from tonnage.units import GIB

FEW = 40
"""Jobs of a script for which its process takes about as long to begin as to answer: such run side by side."""

Progress = Callable[[str], None]
Predicted = dict[str, Any]
"""GiB by metric, or `error`."""


def predict(
    rows: Sequence[Row],
    progress: Progress = lambda text: None,
    at_once: int | None = None,
    torch: str | None = None,
) -> list[tuple[Row, Predicted]]:
    """Each row with what the ghost says of it; `at_once` jobs at a time (default: one a core).

    `torch` is a version, or a folder that holds one, in place of the installed one and of those that rows name.
    """
    jobs = {row.job: row for row in rows}
    alike: dict[tuple[str, tuple[str, ...]], list[Row]] = defaultdict(list)
    for row in jobs.values():
        alike[row.script, row.software].append(row)
    few = [chosen for chosen in alike.values() if len(chosen) < FEW]
    many = [chosen for chosen in alike.values() if len(chosen) >= FEW]
    most = at_once or len(os.sched_getaffinity(0))
    answers: dict[str, Predicted] = {}

    def take(chosen: Sequence[Row], jobs_at_once: int) -> None:
        try:
            given = software.given(chosen[0].software, torch)
        except TonnageError as error:
            answers.update((row.job, {"error": str(error)}) for row in chosen)
        else:
            answers.update((row.job, answer) for row, answer in _of_process(chosen, progress, jobs_at_once, given))

    with ThreadPoolExecutor(most) as side_by_side:
        list(side_by_side.map(lambda chosen: take(chosen, 1), few))
    for chosen in many:
        take(chosen, most)
    ended: Predicted = {"error": "the ghost process ended early"}
    return [(row, answers.get(row.job, ended)) for row in rows]


def _of_process(
    chosen: Sequence[Row], progress: Progress, at_once: int, given: Given
) -> Iterator[tuple[Row, Predicted]]:
    """Rows of one script and software with their predictions, as they come: scripts import libraries differently."""
    process = _start(at_once, given)
    assert process.stdin is not None
    assert process.stdout is not None
    sender = threading.Thread(target=_send, args=(process.stdin, chosen), daemon=True)
    sender.start()
    for done, line in enumerate(process.stdout, start=1):
        answer = json.loads(line)
        row = chosen[answer.pop("number")]
        progress(f"{row.script} {done} of {len(chosen)}: {row.source}: {row.name}")
        yield row, _in_gib(answer, parse_cluster(row.gpu).device)
    process.wait()


def _start(at_once: int, given: Given) -> subprocess.Popen[str]:
    variables = environment(torch=given.torch) | dict(given.variables)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        variables.pop(name, None)
    paths = [*given.paths, variables["PYTHONPATH"], str(ROOT / "src"), str(ROOT)]
    variables["PYTHONPATH"] = os.pathsep.join(paths)
    variables["TORCHINDUCTOR_COMPILE_THREADS"] = (
        "1"  # each job would start a pool of compilers for a handful of kernels
    )
    variables["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # else asking for CUDA during an import makes forks useless
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.accuracy.inside", str(at_once)],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )


def _send(pipe: Any, rows: Sequence[Row]) -> None:
    """All requests, then the end; a thread of its own, because answers come meanwhile."""
    with pipe:
        for number, row in enumerate(rows):
            request = {"number": number, "settings": parse_cluster(row.gpu).device.ghost_settings()}
            asked = {name: getattr(row, name) for name in ("script", "arguments", "ranks", "rank")}
            pipe.write(json.dumps(request | asked) + "\n")


def _in_gib(answer: dict[str, Any], device: Device) -> Predicted:
    if "error" in answer:
        return answer
    found = {metric: answer[f"{metric}_bytes"] for metric in METRICS if f"{metric}_bytes" in answer}
    if "reserved" in found:
        found.setdefault("process", found["reserved"] + device.context_bytes)
    return {metric: size / GIB for metric, size in found.items()}
