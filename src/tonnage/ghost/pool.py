"""A warm worker: one ghost process that answers many jobs, each in a fork of its own."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from tonnage import trace
from tonnage.device import Cluster
from tonnage.errors import CannotEstimate, TonnageError, TrialFailed, UsageError
from tonnage.ghost.process import environment
from tonnage.ghost.wheel import Progress, find
from tonnage.job import Job
from tonnage.plan import Plan
from tonnage.trace import Trace

_BY_EXIT_CODE: Mapping[int, type[TonnageError]] = {2: UsageError, 3: CannotEstimate, 5: TrialFailed}


class Worker:
    """A ghost process that imported torch once.  Use it as a context manager; `run` as often as wanted.

    `torch_version` runs another torch than the installed one.  Raises GhostUnavailable.
    """

    def __init__(self, torch_version: str | None = None, progress: Progress = lambda text: None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tonnage-")
        progress("starting the ghost")
        torch = find(sys.executable, torch_version, progress)
        self._errors = (Path(self._folder.name) / "stderr").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tonnage.ghost.worker"],
            env=self._environment(torch),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
        )
        self._read()

    @staticmethod
    def _environment(torch: Any) -> dict[str, str]:
        variables = environment(torch=torch)
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            variables.pop(name, None)  # each job says which allocator it wants
        package = str(Path(__file__).parents[2])
        variables["PYTHONPATH"] = f"{variables['PYTHONPATH']}:{package}"
        return variables

    def run(
        self, job: Job, plan: Plan, cluster: Cluster, *, rank: int = 0, steps: int = 3, log: bool = True
    ) -> Trace:
        """The Trace of one rank of the job.  Raises CannotEstimate, UsageError or TrialFailed."""
        from tonnage.techniques import environment as technique_environment

        target = Path(self._folder.name) / "trace"
        request = {
            "job": asdict(job),
            "plan": asdict(plan),
            "world_size": cluster.gpus,
            "rank": rank,
            "gpus_per_node": cluster.gpus_per_node,
            "steps": steps,
            "settings": cluster.device.ghost_settings(),
            "environment": technique_environment(plan),
            "trace": str(target),
        }
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
        except BrokenPipeError as error:
            raise self._died() from error
        answer = self._read()
        if answer["error"] is not None:
            raise _BY_EXIT_CODE.get(answer["exit_code"], CannotEstimate)(answer["error"])
        found = trace.load(target)
        target.unlink()
        return found

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()
        self._folder.cleanup()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._died()
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def _died(self) -> CannotEstimate:
        self._process.wait()
        self._errors.seek(0)
        said = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        return CannotEstimate(f"The ghost process ended early: {said[-1] if said else 'it said nothing'}")
