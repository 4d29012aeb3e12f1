"""Plans of networks with unknown dimensions get the seconds of their counted steps."""

import struct
from array import array
from dataclasses import replace

import pytest

from solutions import FormulaRunner, question
from tonnage.planner import operation_seconds
from tonnage.planner.solution import Candidate, Choice
from tonnage.planner.solve import search
from tonnage.trace.operations import Operation, StepOperations

UNKNOWN = {"step_seconds": None, "tokens_per_second_per_gpu": None, "mfu": None, "bound_by": None}


def worked(flops: int) -> StepOperations:
    """Return a step of one matrix product."""
    record = struct.pack("<BBHIIIIIIIQQQQ", 13, 0, 0, 0, 0, *[0] * 9)
    product = Operation("forward", "mm", "product", "bfloat16", flops, 0, 1, True, False, 0, 2)
    return StepOperations(
        operations=(product,),
        numbers=array("q", [0, 0, 1]),
        phases={0: "forward"},
        passed_on={},
        names=("",),
        log=record,
    )


class Counting(FormulaRunner):
    """Counts 1e15 operations for each micro-batch, and one micro-batch more for the slow plan."""

    def __init__(self, slow: Candidate | None = None) -> None:
        super().__init__()
        self.slow = slow
        self.counted: list[Candidate] = []

    def count_operations(self, candidate: Candidate, cluster: object) -> StepOperations | None:  # type: ignore[override]
        self.counted.append(candidate)
        more = self.slow is not None and candidate.plan == self.slow.plan
        return worked(10**15 * (candidate.job.grad_accum + more))


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> list[Choice]:
    monkeypatch.setattr(operation_seconds, "_is_countable", lambda candidate, cluster: True)
    found = search(question(gpu="8xh100-80gb", grad_accum=4), FormulaRunner(), top=3, explain=False).plans
    return [replace(one, estimate=replace(one.estimate, time=UNKNOWN)) for one in found]


def test_fastest_choice_becomes_the_best(choices: list[Choice]) -> None:
    asked = question(gpu="8xh100-80gb", grad_accum=4)
    slow = choices[0].candidate
    found = operation_seconds.add_seconds(choices, Counting(slow), asked, lambda text: None)
    assert found[0].candidate != slow
    assert [one.name == "best" for one in found] == [True, *[False] * (len(found) - 1)]
    rates = [one.estimate.time["tokens_per_second_per_gpu"] for one in found]
    assert rates == sorted(rates, reverse=True)


def test_two_of_many_micro_batches_are_counted(choices: list[Choice]) -> None:
    asked, runner = question(gpu="8xh100-80gb", grad_accum=4), Counting()
    job = replace(choices[0].candidate.job, grad_accum=6)
    many = replace(choices[0], candidate=replace(choices[0].candidate, job=job))
    (found,) = operation_seconds.add_seconds([many], runner, asked, lambda text: None)
    assert [one.job.grad_accum for one in runner.counted] == [1, 2]
    time = found.estimate.time
    peak = asked.cluster.device.peak_flops.bf16
    assert time["mfu"] == pytest.approx(6e15 / time["step_seconds"] / peak)


def test_uncountable_choices_keep_their_time(choices: list[Choice]) -> None:
    asked = question(gpu="8xh100-80gb", grad_accum=4)
    assert operation_seconds.add_seconds(choices, FormulaRunner(), asked, lambda text: None) == choices  # type: ignore[arg-type]
