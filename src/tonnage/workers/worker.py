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
from tonnage.ghost.process import any_libraries, forking
from tonnage.ghost.scratch import scratch
from tonnage.ghost.wheel import Progress, find
from tonnage.job import Job
from tonnage.plans import Plan
from tonnage.shallow.requests import Requests
from tonnage.trace import operations as worked
from tonnage.trace import trace
from tonnage.trace.gc_paused import gc_paused
from tonnage.trace.operations import StepOperations
from tonnage.trace.trace import Trace

_PROGRAM: Final = ("-P", "-m", "tonnage.workers.server")
"""What the ghost process runs; files of the folder it is started in stand in for no library."""

_PACKAGE: Final = Path(__file__).parents[2]
"""The folder that tonnage is imported from."""


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
    """What a worker is asked, as JSON: all that it hears of the job, and so all that its Trace can depend on.

    `sketched`: what would have to be compiled has something as large in its place (`tonnage.step.flex_stub`).
    """
    from tonnage.techniques import environment as technique_environment
    from tonnage.trainers.loop.run import TONNAGE

    # By blocks that come back later than they were given back no deeper network is told (`tonnage.shallow`).
    events = {"GHOST_EVENTS": "immediate"} if plan.engine == TONNAGE.name else {}
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
    """A ghost process that imported torch once.  Use it as a context manager; `run` as often as wanted.

    `torch_version` runs another torch than the installed one; without `wait` the first job waits for the import.
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
        """The version that was asked for; None for the installed one."""
        any_libraries()
        progress("starting the ghost")
        torch = find(sys.executable, torch_version, progress)
        self.answered = False
        """Whether it has answered a job, with a Trace or with why there is none."""
        self._held = contextlib.ExitStack()
        self._folder = self._held.enter_context(scratch("tonnage-"))
        self.trace_file = self._folder / "trace"
        """Where the Trace of the last job was written; the next one replaces it."""
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
            with self._abandoned_on_error():
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
        """The Trace of one rank of the job.  Raises CannotEstimate, UsageError or TrialFailed.

        One job at a time: threads need a Worker each.  A worker that died or was interrupted is closed.
        """
        asked = request(job, plan, cluster, rank=rank, steps=steps, repeated=repeated, sketched=sketched)
        return self._traced(asked)

    def again(
        self, requests: Requests, job: Job, plan: Plan, cluster: Cluster, *, rank: int = 0, repeated: int = 0
    ) -> Trace:
        """The Trace of a step's requests, and of so many repetitions, without the program that makes them.

        Raises CannotEstimate.
        """
        self._check_open()
        path = self._folder / "requests"
        requests.write(path)
        asked = request(job, plan, cluster, rank=rank, steps=1, repeated=repeated)
        return requests.traced(self._traced(asked | {"requests": str(path)}))

    def worked(self, job: Job, plan: Plan, cluster: Cluster, *, rank: int = 0) -> StepOperations:
        """What the operations of one rank's second step work.  Raises CannotEstimate as `run` does."""
        path = self._folder / "worked"
        path.unlink(missing_ok=True)
        asked = request(job, plan, cluster, rank=rank, steps=2)
        self._traced(asked | {"worked": str(path)})
        found = worked.load(path)
        if found is None:
            raise CannotEstimate("The step ended early, so that its operations are not known.")
        return found

    def _traced(self, asked: dict[str, Any]) -> Trace:
        self._check_open()
        with self._abandoned_on_error():
            self._wait_until_ready()
            answer = self._ask(asked | {"trace": str(self.trace_file)})
            self.answered = True
        if answer["error"] is not None:
            raise of_kind(answer["kind"], answer["error"])
        with gc_paused():  # a Trace is many small things that all stay
            return trace.load(self.trace_file)

    def _check_open(self) -> None:
        if self.closed:
            raise CannotEstimate("The worker is closed; start another one.")

    def close(self) -> None:
        """End the process."""
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
        """Whether it has ended; it can run no more."""
        return self._errors.closed

    @contextlib.contextmanager
    def _abandoned_on_error(self) -> Iterator[None]:
        """End the process and its running child at once: the answer to come would be taken for the next job's."""
        try:
            yield
        except BaseException:
            self.kill()
            self.close()
            raise

    def kill(self) -> None:
        """End the process and what it runs at once; who waits for an answer gets CannotEstimate."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _wait_until_ready(self) -> None:
        """Until it has imported torch, which it says once."""
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
        said = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        return CannotEstimate(f"The ghost process ended early: {said[-1] if said else 'it said nothing'}")
