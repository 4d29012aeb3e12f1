"""Fakes of the functions that commands call, so that the commands are tested without running a step."""

from dataclasses import dataclass, field
from typing import Any

import pytest

import estimates
from tonnage.case import Case
from tonnage.cli import main
from tonnage.estimates import predict
from tonnage.estimates.estimate import Estimate
from tonnage.estimates.from_traces import Run
from tonnage.job import Job
from tonnage.plans import Plan
from tonnage.script import dry_run


@dataclass
class Calls:
    """The arguments that commands passed, and the answer or error that they get."""

    estimate: Estimate = field(default_factory=estimates.fitting)
    error: BaseException | None = None
    job: Job | None = None
    plan: Plan | None = None
    assumed: tuple[str, ...] = ()
    command: list[str] | None = None
    cluster: Any = None
    options: dict[str, Any] = field(default_factory=dict)

    def answer(self) -> Run:
        if self.error is not None:
            raise self.error
        return Run(estimate=self.estimate, traces=())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Replace the two functions that run something by functions that record their arguments."""
    recorded = Calls()

    def estimate(case: Case, **options: Any) -> Run:
        recorded.assumed = case.assumed
        recorded.job, recorded.plan, recorded.cluster, recorded.options = case.job, case.plan, case.cluster, options
        return recorded.answer()

    def run(command: list[str], cluster: Any, **options: Any) -> Run:
        recorded.command, recorded.cluster, recorded.options = command, cluster, options
        return recorded.answer()

    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(predict, "estimate", estimate)
    monkeypatch.setattr(dry_run, "run", run)
    return recorded


@dataclass(frozen=True)
class Ended:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str


@pytest.fixture
def tonnage(capsys: pytest.CaptureFixture[str]):
    """Return a function that runs a command line and returns its exit code, standard output and standard error."""

    def run(*arguments: str) -> Ended:
        code = main.run(arguments)
        out, err = capsys.readouterr()
        return Ended(code, out, err)

    return run
