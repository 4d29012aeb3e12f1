"""Tests of `tonnage plan MODEL`: options of the command line reach the search."""

from typing import Any

import pytest
from lines import is_one_line

import estimates
import tonnage as package
from tonnage.errors import UsageError
from tonnage.job import Job
from tonnage.model import ModelRef
from tonnage.planner import ask, plan_file
from tonnage.planner.question import Question
from tonnage.planner.solution import Candidate, Choice, Solution
from tonnage.plans import Plan


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Question]:
    """Record the questions that were asked; nothing fits."""
    recorded: list[Question] = []

    def unsupported(question: Question, **others: Any) -> Solution:
        recorded.append(question)
        return Solution(status="unsupported", question={})

    monkeypatch.setattr(ask, "solve", unsupported)
    return recorded


def test_a_plan_is_saved_with_the_gpus_that_find_answers(tonnage, monkeypatch, tmp_path):
    candidate = Candidate(job=Job(model=ModelRef(name="gpt2", kind="config")), plan=Plan(tp=2))
    choice = Choice(name="best", candidate=candidate, estimate=estimates.fitting())
    questions: list[Question] = []

    def four(find: str, question: Question, **others: Any) -> Solution:
        questions.append(question)
        cards = {"gpu": "4xt4", "gpu_memory_bytes": None}
        return Solution(status="found", question=cards, plans=(choice,))

    monkeypatch.setattr(ask, "find_limit", four)
    path = tmp_path / "plan.toml"
    given = ("plan", "gpt2", "--gpu", "t4", "--offline", "--find", "min-gpus", "--tp", "2", "--save", str(path))
    assert tonnage(*given, "--json").code == 0
    assert plan_file.read(path).gpu == "4xt4"
    package.plan("gpt2", gpu="t4", offline=True, find="min-gpus", tp=2)
    assert [str(question.cluster) for question in questions] == ["2xt4", "2xt4"]


@pytest.mark.parametrize(
    ("given", "methods"),
    [
        ("any", ("full", "lora", "qlora")),
        ("full, lora", ("full", "lora")),
        ("lora", ()),
        ("lora,lora,qlora", ("lora", "qlora")),
    ],
)
def test_methods_are_compared(tonnage, asked, given, methods):
    assert tonnage("plan", "gpt2", "--gpu", "t4", "--offline", "--method", given, "--json").code == 1
    package.plan("gpt2", gpu="t4", offline=True, method=given)
    assert [question.methods for question in asked] == [methods, methods]
    assert {question.job.method for question in asked} == {methods[0] if methods else given}


def test_an_unknown_method_is_refused(tonnage, asked):
    ended = tonnage("plan", "gpt2", "--gpu", "t4", "--offline", "--method", "full,dora")
    assert (ended.code, ended.out, asked) == (2, "", [])
    assert is_one_line(ended.err)
    assert "'dora'" in ended.err
    assert "any, full, lora, qlora" in ended.err


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("--gpu t4 --timeout 5", "--timeout 5 is for a script"),
        ("--gpu t4 --find min-gpu", "looks for the card, and --gpu says it"),
        ("--gpu 4xt4 --find min-gpus", "looks for the number of GPUs, and --gpu says 4"),
        ("--gpu t4 --find max-seq-len --seq-len 512", "leave --seq-len out"),
        ("--gpu t4 --attention flash", "needs compute capability 8.0, and t4 has 7.5"),
    ],
)
def test_a_contradiction_is_refused_before_the_search(tonnage, asked, given, reason):
    ended = tonnage("plan", "gpt2", "--offline", *given.split())
    assert (ended.code, ended.out, asked) == (2, "", [])
    assert is_one_line(ended.err)
    assert reason in ended.err


def test_python_refuses_the_same():
    for find, options in (("min-gpu", {"gpu": "t4"}), ("min-gpus", {"gpu": "t4", "gpus": 8})):
        with pytest.raises(UsageError, match="looks for the"):
            package.plan("gpt2", find=find, offline=True, **options)
    for command in (package.plan, package.estimate):
        with pytest.raises(UsageError, match="needs several GPUs that average"):
            command("gpt2", gpu="t4", accum_sync=True, offline=True)


def test_min_gpus_accepts_options_of_several_gpus(tonnage, monkeypatch):
    questions: list[Question] = []
    answer = Solution(status="unsupported", question={"gpu": "t4", "gpu_memory_bytes": None})
    monkeypatch.setattr(ask, "find_limit", lambda find, question, **others: questions.append(question) or answer)
    given = ("--gpu", "t4", "--find", "min-gpus", "--accum-sync", "--json")
    assert tonnage("plan", "gpt2", "--offline", *given).code == 1
    assert questions[0].plan.accum_sync


def test_a_plan_names_a_model_folder_by_its_absolute_path(tonnage, monkeypatch, tmp_path):
    job = Job(model=ModelRef(name="mine", kind="config"))
    choice = Choice(name="best", candidate=Candidate(job=job, plan=Plan()), estimate=estimates.fitting())
    solution = Solution(status="found", question={"gpu": "t4", "gpu_memory_bytes": None}, plans=(choice,))
    monkeypatch.setattr(ask, "solve", lambda question, **others: solution)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(tonnage("models", "gpt2", "--config").out)
    assert tonnage("plan", "./mine", "--gpu", "t4", "--save", "plan.toml", "--json").code == 0
    assert plan_file.read(tmp_path / "plan.toml").model == str(tmp_path / "mine")


def test_techniques_may_be_named_in_one_option_or_several(tonnage: Any, asked: list[Question]) -> None:
    limits = ["--without", "tp", "--without", "pp,cp", "--allow", "precision,budget"]
    tonnage("plan", "gpt2", "--gpu", "t4", "--offline", *limits)
    (question,) = asked
    assert (question.without, question.only, question.allow) == (("tp", "pp", "cp"), (), ("precision", "budget"))
