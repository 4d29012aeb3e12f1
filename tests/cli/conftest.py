"""Fakes for what the commands call, so that their own part can be tested without running a step."""

from dataclasses import dataclass, field
from typing import Any

import pytest

import estimates
from tonnage.case import Case
from tonnage.cli import main
from tonnage.estimates import predict
from tonnage.estimates.estimate import Estimate
from tonnage.estimates.summary import Run
from tonnage.job import Job
from tonnage.plans import Plan
from tonnage.script import dry_run as dryrun


@dataclass
class Calls:
    """What the commands asked for, and what they are answered."""

    estimate: Estimate = field(default_factory=estimates.fitting)
    error: BaseException | None = None
    job: Job | None = None
    plan: Plan | None = None
    command: list[str] | None = None
    cluster: Any = None
    options: dict[str, Any] = field(default_factory=dict)

    def answer(self) -> Run:
        if self.error is not None:
            raise self.error
        return Run(estimate=self.estimate, traces=())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The two functions that run something, replaced by ones that note their arguments."""
    noted = Calls()

    def estimate(case: Case, **options: Any) -> Run:
        noted.job, noted.plan, noted.cluster, noted.options = case.job, case.plan, case.cluster, options
        return noted.answer()

    def run(command: list[str], cluster: Any, **options: Any) -> Run:
        noted.command, noted.cluster, noted.options = command, cluster, options
        return noted.answer()

    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(predict, "estimate", estimate)
    monkeypatch.setattr(dryrun, "run", run)
    return noted


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def tonnage(capsys: pytest.CaptureFixture[str]):
    """Runs a command line and returns exit code, standard output and standard error."""

    def run(*arguments: str) -> Ended:
        code = main.run(arguments)
        out, err = capsys.readouterr()
        return Ended(code, out, err)

    return run
