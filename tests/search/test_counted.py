"""Plans of networks whose dimensions are not known get the seconds of their counted steps."""

import struct
from array import array
from dataclasses import replace

import pytest

from solutions import Formula, question
from tonnage.planner.solution import Candidate, Choice
from tonnage.search import counted
from tonnage.search.solve import search
from tonnage.trace.operations import Operation, Worked

UNKNOWN = {"step_seconds": None, "tokens_per_second_per_gpu": None, "mfu": None, "bound_by": None}


def worked(flops: int) -> Worked:
    """A step of one product."""
    record = struct.pack("<BBHIIIIIIIQQQQ", 13, 0, 0, 0, 0, *[0] * 9)
    product = Operation("forward", "mm", "product", "bfloat16", flops, 0, 1, True, False, 0, 2)
    return Worked(
        operations=(product,),
        numbers=array("q", [0, 0, 1]),
        phases={0: "forward"},
        passed_on={},
        names=("",),
        log=record,
    )


class Counting(Formula):
    """Counts 1e15 operations for each micro-batch, and as many again for the plan that was the best."""

    def __init__(self, slow: Candidate | None = None) -> None:
        super().__init__()
        self.slow = slow
        self.counted: list[Candidate] = []

    def worked(self, candidate: Candidate, cluster: object) -> Worked | None:  # type: ignore[override]
        self.counted.append(candidate)
        more = self.slow is not None and candidate.plan == self.slow.plan
        return worked(10**15 * (candidate.job.grad_accum + more))


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> list[Choice]:
    monkeypatch.setattr(counted, "_is_counted", lambda candidate, cluster: True)
    found = search(question(gpu="8xh100-80gb", grad_accum=4), Formula(), top=3, explain=False).plans
    return [replace(one, estimate=replace(one.estimate, time=UNKNOWN)) for one in found]


def test_the_fastest_comes_first_and_is_the_best(choices: list[Choice]) -> None:
    asked = question(gpu="8xh100-80gb", grad_accum=4)
    slow = choices[0].candidate
    found = counted.with_seconds(choices, Counting(slow), asked, lambda text: None)
    assert found[0].candidate != slow
    assert [one.name == "best" for one in found] == [True, *[False] * (len(found) - 1)]
    rates = [one.estimate.time["tokens_per_second_per_gpu"] for one in found]
    assert rates == sorted(rates, reverse=True)


def test_of_many_micro_batches_two_are_counted(choices: list[Choice]) -> None:
    asked, ghosts = question(gpu="8xh100-80gb", grad_accum=4), Counting()
    job = replace(choices[0].candidate.job, grad_accum=6)
    many = replace(choices[0], candidate=replace(choices[0].candidate, job=job))
    (found,) = counted.with_seconds([many], ghosts, asked, lambda text: None)
    assert [one.job.grad_accum for one in ghosts.counted] == [1, 2]
    time = found.estimate.time
    peak = asked.cluster.device.peak_flops.bf16
    assert time["mfu"] == pytest.approx(6e15 / time["step_seconds"] / peak)


def test_what_cannot_be_counted_stays_as_it_was_found(choices: list[Choice]) -> None:
    asked = question(gpu="8xh100-80gb", grad_accum=4)
    assert counted.with_seconds(choices, Formula(), asked, lambda text: None) == choices  # type: ignore[arg-type]
