"""What an export writes is estimated first, and is another plan where the nearest settings are not good enough."""

import tomllib
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

import estimates
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.errors import CannotEstimate, GhostUnavailable, UsageError
from tonnage.estimates.estimate import Estimate
from tonnage.estimates.from_traces import Run
from tonnage.planner import ask, exporting
from tonnage.planner.solution import Candidate, Choice, Nearest, Refused, Solution
from tonnage.trainers.cases import request
from tonnage.trainers.targets import find_target
from tonnage.units import GIB

MODEL = "llama-3.2-1b"


def case_of(gpu: str = "8xa100-80gb", **options: Any) -> Case:
    job, plan = request(MODEL, offline=True, seq_len=512, **options)
    return Case(job, plan, parse_cluster(gpu))


def estimate_of(seconds: float, fits: bool = True) -> Estimate:
    made = estimates.fitting()
    return replace(made, fits=fits, time={**made.time, "step_seconds": seconds})


class Runs:
    """Answers of estimates and of a search, and what was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_engine: dict[str, Estimate | Exception] = {"tonnage": estimate_of(1.0)}
        self.solution: Callable[[Any], Solution] = lambda question: pytest.fail("nothing is to be searched")
        self.questions: list[Any] = []
        monkeypatch.setattr(exporting.predict, "answer", self.answer)
        monkeypatch.setattr(ask, "answer", self.search)

    def answer(self, case: Case, **how: Any) -> Run:
        given = self.by_engine[case.plan.engine]
        if isinstance(given, Exception):
            raise given
        fits = given.fits or case.cluster.device.capacity_bytes > 1000 * GIB
        return Run(estimate=replace(given, plan=asdict(case.plan), fits=fits), traces=())

    def search(self, question: Any, **how: Any) -> Solution:
        self.questions.append(question)
        return self.solution(question)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(monkeypatch)


def found(seconds: float, **plan: Any) -> Callable[[Any], Solution]:
    """Return a search that finds this plan, with two sequences a micro-batch."""

    def answer(question: Any) -> Solution:
        job = replace(question.job, micro_batch=2, grad_accum=1, global_batch_tokens=None)
        candidate = Candidate(job=job, plan=replace(question.plan, **plan))
        choice = Choice(name="best", candidate=candidate, estimate=estimate_of(seconds))
        return Solution(status="found", question={}, plans=(choice,))

    return answer


def none(status: Any, **more: Any) -> Callable[[Any], Solution]:
    return lambda question: Solution(status=status, question={}, **more)


def prepare(case: Case, to: str = "hf-trainer", **how: Any) -> exporting.Prepared:
    return exporting.prepare(case, MODEL, find_target(to), offline=True, **how)


SELECTIVE: dict[str, Any] = {"shard": "zero3", "checkpointing": "selective", "grad_accum": 2}


def test_the_nearest_settings_are_written_with_what_they_need(runs: Runs) -> None:
    runs.by_engine["hf-trainer"] = estimate_of(1.05)
    prepared = prepare(case_of(**SELECTIVE))
    assert prepared.export is not None
    assert [(item.option, item.instead) for item in prepared.export.unexpressed] == [("checkpointing", "full")]
    assert prepared.checked == (
        "Under engine hf-trainer: 60.00 GiB of 80.00 GiB on each GPU, 1.05 s a step. "
        "The plan, under engine tonnage: 60.00 GiB of 80.00 GiB on each GPU, 1 s a step."
    )


def test_the_plan_as_written_is_among_the_files(runs: Runs) -> None:
    runs.by_engine["hf-trainer"] = estimate_of(1.05)
    export = prepare(case_of(**SELECTIVE)).export
    assert export is not None
    [text] = [item.text for item in export.files if item.name == exporting.FILE]
    written = tomllib.loads(text)
    assert written["plan"]["engine"] == "hf-trainer"
    assert (written["plan"]["checkpointing"], written["job"]["grad_accum"]) == ("full", 2)


def test_another_plan_is_written_where_the_nearest_settings_do_not_fit(runs: Runs) -> None:
    runs.by_engine["hf-trainer"] = estimate_of(1.0, fits=False)
    runs.solution = found(1.3, shard="zero3", checkpointing="full")
    prepared = prepare(case_of(**SELECTIVE))
    assert prepared.export is not None
    listed = {item.option: (item.value, item.instead) for item in prepared.export.unexpressed}
    assert listed == {"checkpointing": ("selective", "full"), "micro-batch": ("1", "2"), "grad-accum": ("2", "1")}
    assert (
        "Another plan was taken, because the nearest settings do not fit: they need 60.00 GiB of 80.00"
        in prepared.checked
    )
    [question] = runs.questions
    assert question.sequences == 16
    assert question.plan.engine == "hf-trainer"
    assert question.is_open("checkpointing")
    assert not question.is_open("precision")


def test_it_is_said_where_the_host_has_too_little(runs: Runs) -> None:
    made = estimate_of(1.0)
    runs.by_engine["hf-trainer"] = made.with_host(made.host.with_machine(600 * GIB, {}, 512 * GIB))
    runs.solution = none("too_large")
    checked = prepare(case_of(**SELECTIVE)).checked
    assert "do not fit: they need 600.00 GiB of host memory, and a machine has 512.00 GiB, and no plan" in checked


def test_a_search_keeps_to_what_the_target_can_express(runs: Runs) -> None:
    """The engine of torchrun's plans does more than its script."""
    runs.by_engine["tonnage"] = estimate_of(1.0, fits=False)
    runs.solution = none("too_large")
    assert prepare(case_of(**SELECTIVE), "torchrun").export is None
    assert {"tp", "pp", "optimizer-in-backward", "activation-offload=cpu"} <= set(runs.questions[0].without)


def test_a_faster_plan_is_written_where_the_nearest_settings_are_slow(runs: Runs) -> None:
    runs.by_engine["hf-trainer"] = estimate_of(1.3)
    runs.solution = found(1.1, shard="zero2")
    prepared = prepare(case_of(**SELECTIVE))
    assert prepared.export is not None
    assert prepared.export.plan.shard == "zero2"
    assert "take 30 % longer than the plan" in prepared.checked


@pytest.mark.parametrize("solution", [found(1.29, shard="zero2"), none("too_large")])
def test_slow_settings_are_written_where_no_plan_is_faster(runs: Runs, solution: Any) -> None:
    runs.by_engine["hf-trainer"] = estimate_of(1.3)
    runs.solution = solution
    prepared = prepare(case_of(**SELECTIVE))
    assert prepared.export is not None
    assert prepared.export.plan.shard == "zero3"
    assert "They take 30 % longer than the plan, and no other plan of hf-trainer's is faster." in prepared.checked


def test_nothing_is_written_where_nothing_fits(runs: Runs) -> None:
    runs.by_engine["hf-trainer"] = estimate_of(1.0, fits=False)
    case = case_of(**SELECTIVE)
    nearest = Nearest(candidate=Candidate(job=case.job, plan=case.plan), needed_bytes=90 * GIB, missing_bytes=GIB)
    runs.solution = none("too_large", nearest=nearest)
    prepared = prepare(case)
    assert prepared.export is None
    assert "no plan that hf-trainer can express fits; the smallest needs 90.00 GiB. Nothing" in prepared.checked


def test_settings_that_crash_are_not_written(runs: Runs) -> None:
    runs.by_engine["hf-trainer"] = CannotEstimate("The step failed: unscale.")
    runs.solution = none("unsupported", refused=(Refused(what="all", why="The step failed: unscale."),))
    with pytest.raises(
        UsageError, match=r"hf-trainer: the nearest settings cannot be run: The step failed: unscale\. Nothing was"
    ):
        prepare(case_of(**SELECTIVE))


def test_degrees_that_the_target_has_not_are_searched_for(runs: Runs) -> None:
    runs.solution = found(1.0, shard="zero3")
    prepared = prepare(case_of(tp=2, shard="zero3", grad_accum=2))
    assert runs.questions[0].sequences == 2 * 4  # of the plan's four data-parallel ranks
    assert prepared.export is not None
    assert {item.option: item.instead for item in prepared.export.unexpressed}["tp"] == "1"
    assert "hf-trainer cannot do tp 2" in prepared.checked


def test_the_plan_itself_is_estimated_and_described_once(runs: Runs) -> None:
    prepared = prepare(case_of(shard="zero3"), "torchrun")
    assert prepared.checked == "Under engine tonnage: 60.00 GiB of 80.00 GiB on each GPU, 1 s a step."


def test_an_optimizer_that_the_trainer_cannot_divide_is_left(runs: Runs) -> None:
    runs.solution = lambda question: (
        found(1.0, shard="zero3")(question) if question.plan.optimizer == "adamw" else none("too_large")(question)
    )
    prepared = prepare(case_of(shard="zero3", optimizer="adamw-8bit"))
    assert prepared.export is not None
    assert {item.option: item.instead for item in prepared.export.unexpressed}["optimizer"] == "adamw"
    assert "cannot be written: optimizer=adamw-8bit: it fails on parameters that FSDP2 divides" in prepared.checked


def test_strict_takes_no_other_plan(runs: Runs) -> None:
    with pytest.raises(UsageError, match=r"cannot express checkpointing=selective .*Nothing was written\."):
        prepare(case_of(**SELECTIVE), strict=True)
    runs.by_engine["hf-trainer"] = estimate_of(1.0, fits=False)
    assert prepare(case_of(shard="zero3"), strict=True).export is None
    runs.by_engine["hf-trainer"] = estimate_of(1.5)
    assert "They take 50 % longer than the plan." in prepare(case_of(shard="zero3"), strict=True).checked


def test_without_a_check_nothing_is_run(runs: Runs) -> None:
    runs.by_engine.clear()
    prepared = prepare(case_of(**SELECTIVE), check=False)
    assert prepared.export is not None
    assert prepared.checked == "Not estimated: --no-check was given."
    with pytest.raises(UsageError, match="cannot do tp 2"):
        prepare(case_of(tp=2, shard="zero3"), check=False)


def test_where_no_ghost_runs_it_is_said(runs: Runs) -> None:
    runs.by_engine["tonnage"] = GhostUnavailable("This is macOS.")
    prepared = prepare(case_of(**SELECTIVE))
    assert prepared.export is not None
    assert prepared.checked == "Not estimated: This is macOS."


def test_a_package_that_is_missing_is_named(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    from tonnage.trainers import engine

    monkeypatch.setattr(engine, "find_version", lambda package: None)
    prepared = prepare(case_of(**SELECTIVE))
    assert prepared.export is not None
    assert "the package transformers is not installed (pip install transformers)" in prepared.checked


def test_without_ligers_package_the_plain_loss_is_estimated(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    from tonnage.trainers.hf_trainer import run

    monkeypatch.setattr(run, "find_version", lambda package: None)
    runs.by_engine["hf-trainer"] = estimate_of(1.0)
    prepared = prepare(case_of("a100-80gb", loss="chunked"))
    assert prepared.export is not None
    assert prepared.export.plan.loss == "liger"
    assert "the package liger-kernel is not installed (pip install liger-kernel" in prepared.checked
    assert "With the plain loss, which needs more: 60.00 GiB of 80.00 GiB" in prepared.checked
