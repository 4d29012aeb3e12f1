"""A warm worker: one ghost process that answers many jobs, each in a fork of its own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from tonnage.catalog.overheads import ghost_settings
from tonnage.cluster import Cluster
from tonnage.errors import CannotEstimate, of_kind
from tonnage.ghost.environment import any_libraries, forking
from tonnage.ghost.scratch import scratch
from tonnage.ghost.wheel import Progress, find
from tonnage.job import Job
from tonnage.plans import Plan
from tonnage.shallow.requests import Requests
from tonnage.trace import operations, trace
from tonnage.trace.gc_paused import gc_paused
from tonnage.trace.operations import StepOperations
from tonnage.trace.trace import Trace

_PROGRAM: Final = ("-P", "-m", "tonnage.workers.start")
"""Arguments of the ghost's Python; -P keeps files of the current folder from shadowing libraries."""

_PACKAGE: Final = Path(__file__).parents[2]
"""Folder that tonnage is imported from."""


def request(
    job: Job,
    plan: Plan,
    cluster: Cluster,
    *,
    rank: int,
    steps: int,
    repeated: int = 0,
    sketched: bool = False,
) -> dict[str, Any]:
    """Return the request of a job as JSON: everything that the worker knows of it, and that its Trace can depend on.

    `sketched` replaces an operation that would have to be compiled by one as large (`tonnage.step.flex_stub`).
    """
    from tonnage.techniques import environment as technique_environment
    from tonnage.trainers.loop.run import TONNAGE_ENGINE

    # Deeper networks can be derived (`tonnage.shallow`) only if blocks are freed at once when they are given back.
    events = {"GHOST_EVENTS": "immediate"} if plan.engine == TONNAGE_ENGINE.name else {}
    return {
        "job": asdict(job),
        "plan": asdict(plan),
        "world_size": cluster.gpus,
        "rank": rank,
        "gpus_per_node": cluster.gpus_per_node,
        "steps": steps,
        "repeated": repeated,
        "settings": {**ghost_settings(cluster), **events},
        "environment": technique_environment(plan),
        **({"sketched": True} if sketched and plan.attention == "flex" else {}),
    }


class Worker:
    """A ghost process that imports torch once and answers many jobs.  Use it as a context manager.

    `torch_version` selects another torch than the installed one; without `wait` the first job waits for the import.
    Raises GhostUnavailable.
    """

    def __init__(
        self,
        torch_version: str | None = None,
        progress: Progress = lambda text: None,
        *,
        wait: bool = True,
    ) -> None:
        self.torch_version = torch_version
        """Version of torch that was asked for; None for the installed one."""
        any_libraries()
        progress("starting the ghost")
        torch = find(sys.executable, torch_version, progress)
        self.answered = False
        """True once it has answered a job, with a Trace or with an error."""
        self._held = contextlib.ExitStack()
        self._folder = self._held.enter_context(scratch("tonnage-"))
        self.trace_file = self._folder / "trace"
        """File of the last job's Trace; the next job replaces it."""
        self._errors = (self._folder / "stderr").open("w+")
        variables = forking(torch) | {"TMPDIR": str(self._folder)}
        variables["PYTHONPATH"] = f"{variables['PYTHONPATH']}:{_PACKAGE}"
        self._process = subprocess.Popen(
            [sys.executable, *_PROGRAM],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        self._ready = False
        if wait:
            with self._killed_on_error():
                self._wait_until_ready()

    def run(
        self,
        job: Job,
        plan: Plan,
        cluster: Cluster,
        *,
        rank: int = 0,
        steps: int = 3,
        repeated: int = 0,
        sketched: bool = False,
    ) -> Trace:
        """Return the Trace of one rank of the job.  Raises CannotEstimate, UsageError or TrialFailed.

        A worker runs one job at a time: threads need a Worker each.  One that died or was interrupted is closed.
        """
        return self._trace(request(job, plan, cluster, rank=rank, steps=steps, repeated=repeated, sketched=sketched))

    def repeat(
        self, requests: Requests, job: Job, plan: Plan, cluster: Cluster, *, rank: int = 0, repeated: int = 0
    ) -> Trace:
        """Return the Trace of a step's requests and their repetitions, without the program that makes them.

        Raises CannotEstimate.
        """
        self._check_open()
        path = self._folder / "requests"
        requests.write(path)
        document = request(job, plan, cluster, rank=rank, steps=1, repeated=repeated)
        return requests.traced(self._trace(document | {"requests": str(path)}))

    def count_operations(self, job: Job, plan: Plan, cluster: Cluster, *, rank: int = 0) -> StepOperations:
        """Return the FLOPs and bytes of the operations in one rank's second step.

        Raises CannotEstimate as `run` does.
        """
        path = self._folder / "worked"
        path.unlink(missing_ok=True)
        document = request(job, plan, cluster, rank=rank, steps=2)
        self._trace(document | {"worked": str(path)})
        counted = operations.load(path)
        if counted is None:
            raise CannotEstimate("The step ended early, so that its operations are not known.")
        return counted

    def _trace(self, document: dict[str, Any]) -> Trace:
        self._check_open()
        with self._killed_on_error():
            self._wait_until_ready()
            answer = self._ask(document | {"trace": str(self.trace_file)})
            self.answered = True
        if answer["error"] is not None:
            raise of_kind(answer["kind"], answer["error"])
        with gc_paused():  # a Trace has many small objects that all stay alive
            return trace.load(self.trace_file)

    def _check_open(self) -> None:
        if self.closed:
            raise CannotEstimate("The worker is closed; start another one.")

    def close(self) -> None:
        """End the process when it has answered."""
        if self.closed:
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process.stdout.close()
        self._errors.close()
        self._held.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """True once it has ended and can run no more jobs."""
        return self._errors.closed

    @contextlib.contextmanager
    def _killed_on_error(self) -> Iterator[None]:
        """Kill the process and its running child on an error: its late answer would be taken for the next job's."""
        try:
            yield
        except BaseException:
            self.kill()
            self.close()
            raise

    def kill(self) -> None:
        """Kill the process and what it runs; a thread that waits for an answer gets CannotEstimate."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _wait_until_ready(self) -> None:
        """Wait until it has imported torch, which it reports once."""
        if not self._ready:
            self._ready = bool(self._read())

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
        except BrokenPipeError as error:
            raise self._died() from error
        return self._read()

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
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        return CannotEstimate(f"The ghost process ended early: {lines[-1] if lines else 'it printed nothing'}")
