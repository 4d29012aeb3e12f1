"""`tonnage plan MODEL`: what is said on the command line reaches the search."""

from typing import Any

import pytest
from lines import is_one_line

import tonnage as package
from tonnage.search import solve
from tonnage.search.space import Question
from tonnage.solution import Solution


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Question]:
    """The questions that were asked; nothing fits."""
    noted: list[Question] = []

    def unsupported(question: Question, **others: Any) -> Solution:
        noted.append(question)
        return Solution(status="unsupported", question={})

    monkeypatch.setattr(solve, "solve", unsupported)
    return noted


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
