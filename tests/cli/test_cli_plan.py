"""`tonnage plan MODEL`: what is said on the command line reaches the search."""

from typing import Any

import pytest
from lines import is_one_line

import estimates
import tonnage as package
from tonnage import planfile
from tonnage.job import Job, ModelRef
from tonnage.plans import Plan
from tonnage.search import backwards, solve
from tonnage.search.space import Question
from tonnage.solution import Candidate, Choice, Solution


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Question]:
    """The questions that were asked; nothing fits."""
    noted: list[Question] = []

    def unsupported(question: Question, **others: Any) -> Solution:
        noted.append(question)
        return Solution(status="unsupported", question={})

    monkeypatch.setattr(solve, "solve", unsupported)
    return noted


def test_a_plan_is_kept_with_the_cards_that_were_found(tonnage, monkeypatch, tmp_path):
    candidate = Candidate(job=Job(model=ModelRef(name="gpt2", kind="config")), plan=Plan(tp=2))
    found = Choice(name="best", candidate=candidate, estimate=estimates.fitting())
    begun: list[Question] = []

    def four(find: str, question: Question, **others: Any) -> Solution:
        begun.append(question)
        cards = {"gpu": "4xt4", "gpu_memory_bytes": None}
        return Solution(status="found", question=cards, plans=(found,))

    monkeypatch.setattr(backwards, "backwards", four)
    path = tmp_path / "plan.toml"
    said = ("plan", "gpt2", "--gpu", "t4", "--offline", "--find", "min-gpus", "--tp", "2", "--save", str(path))
    assert tonnage(*said, "--json").code == 0
    assert planfile.read(path).gpu == "4xt4"
    package.plan("gpt2", gpu="t4", offline=True, find="min-gpus", tp=2)
    assert [str(one.cluster) for one in begun] == ["2xt4", "2xt4"]


@pytest.mark.parametrize(
    ("said", "methods"),
    [
        ("any", ("full", "lora", "qlora")),
        ("full, lora", ("full", "lora")),
        ("lora", ()),
        ("lora,lora,qlora", ("lora", "qlora")),
    ],
)
def test_methods_are_compared(tonnage, asked, said, methods):
    assert tonnage("plan", "gpt2", "--gpu", "t4", "--offline", "--method", said, "--json").code == 1
    package.plan("gpt2", gpu="t4", offline=True, method=said)
    assert [one.methods for one in asked] == [methods, methods]
    assert {one.job.method for one in asked} == {methods[0] if methods else said}


def test_a_method_that_is_none(tonnage, asked):
    ended = tonnage("plan", "gpt2", "--gpu", "t4", "--offline", "--method", "full,dora")
    assert (ended.code, ended.out, asked) == (2, "", [])
    assert is_one_line(ended.err)
    assert "'dora'" in ended.err
    assert "any, full, lora, qlora" in ended.err
