"""Takes the steps of rows on ghost cards, each job once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from benchmarks.accuracy.rows import METRICS, ROOT, Row

from tonnage.device import parse_cluster
from tonnage.ghost.process import environment
from tonnage.ghost.wheel import find
from tonnage.units import GIB

Progress = Callable[[str], None]
Predicted = dict[str, Any]
"""GiB by metric, or `error`."""


class Ghost:
    """One process that imported torch; use it as a context manager."""

    def __init__(self, torch_version: str | None = None) -> None:
        variables = environment(torch=find(sys.executable, torch_version))
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            variables.pop(name, None)
        variables["PYTHONPATH"] = f"{variables['PYTHONPATH']}:{ROOT / 'src'}:{ROOT}"
        variables["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.accuracy.inside"],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def measure(self, row: Row) -> Predicted:
        """What the row's script says on a ghost of its card: GiB by metric, or `error`."""
        device = parse_cluster(row.gpu).device
        request = {"script": row.script, "arguments": row.arguments, "settings": device.ghost_settings()}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        answer = json.loads(self._process.stdout.readline() or '{"error": "the ghost process ended"}')
        if "error" in answer:
            return dict(answer)
        found = {metric: answer[f"{metric}_bytes"] for metric in METRICS if f"{metric}_bytes" in answer}
        if "reserved" in found:
            found.setdefault("process", found["reserved"] + device.context_bytes)
        return {metric: size / GIB for metric, size in found.items()}

    def __enter__(self) -> Ghost:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()


def predict(rows: Iterable[Row], progress: Progress = lambda text: None) -> list[tuple[Row, Predicted]]:
    """Each row with what the ghost says of it."""
    known: dict[str, Predicted] = {}
    answers = []
    with Ghost() as ghost:
        for row in rows:
            if row.job not in known:
                progress(f"{row.source}: {row.name}")
                known[row.job] = ghost.measure(row)
            answers.append((row, known[row.job]))
    return answers
