"""`tonnage plan MODEL`: what is said on the command line reaches the search."""

from typing import Any

import pytest
from lines import is_one_line

import estimates
import tonnage as package
from tonnage.errors import UsageError
from tonnage.job import Job
from tonnage.model import ModelRef
from tonnage.planner import ask
from tonnage.planner import plan_file as planfile
from tonnage.planner.question import Question
from tonnage.planner.solution import Candidate, Choice, Solution
from tonnage.plans import Plan


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Question]:
    """The questions that were asked; nothing fits."""
    noted: list[Question] = []

    def unsupported(question: Question, **others: Any) -> Solution:
        noted.append(question)
        return Solution(status="unsupported", question={})

    monkeypatch.setattr(ask, "solve", unsupported)
    return noted


def test_a_plan_is_kept_with_the_cards_that_were_found(tonnage, monkeypatch, tmp_path):
    candidate = Candidate(job=Job(model=ModelRef(name="gpt2", kind="config")), plan=Plan(tp=2))
    found = Choice(name="best", candidate=candidate, estimate=estimates.fitting())
    begun: list[Question] = []

    def four(find: str, question: Question, **others: Any) -> Solution:
        begun.append(question)
        cards = {"gpu": "4xt4", "gpu_memory_bytes": None}
        return Solution(status="found", question=cards, plans=(found,))

    monkeypatch.setattr(ask, "find_limit", four)
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


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("--gpu t4 --timeout 5", "--timeout 5 is for a script"),
        ("--gpu t4 --find min-gpu", "looks for the card, and --gpu says it"),
        ("--gpu 4xt4 --find min-gpus", "looks for the number of GPUs, and --gpu says 4"),
        ("--gpu t4 --find max-seq-len --seq-len 512", "leave --seq-len out"),
        ("--gpu t4 --attention flash", "needs compute capability 8.0, and t4 has 7.5"),
    ],
)
def test_what_contradicts_itself_is_not_searched(tonnage, asked, said, reason):
    ended = tonnage("plan", "gpt2", "--offline", *said.split())
    assert (ended.code, ended.out, asked) == (2, "", [])
    assert is_one_line(ended.err)
    assert reason in ended.err


def test_the_same_in_python():
    for find, given in (("min-gpu", {"gpu": "t4"}), ("min-gpus", {"gpu": "t4", "gpus": 8})):
        with pytest.raises(UsageError, match="looks for the"):
            package.plan("gpt2", find=find, offline=True, **given)
    for command in (package.plan, package.estimate):
        with pytest.raises(UsageError, match="needs several GPUs that average"):
            command("gpt2", gpu="t4", accum_sync=True, offline=True)


def test_a_number_of_gpus_that_is_looked_for_may_be_several(tonnage, monkeypatch):
    begun: list[Question] = []
    answer = Solution(status="unsupported", question={"gpu": "t4", "gpu_memory_bytes": None})
    monkeypatch.setattr(ask, "find_limit", lambda find, question, **others: begun.append(question) or answer)
    said = ("--gpu", "t4", "--find", "min-gpus", "--accum-sync", "--json")
    assert tonnage("plan", "gpt2", "--offline", *said).code == 1
    assert begun[0].plan.accum_sync


def test_a_folder_is_found_from_other_folders(tonnage, monkeypatch, tmp_path):
    job = Job(model=ModelRef(name="mine", kind="config"))
    found = Choice(name="best", candidate=Candidate(job=job, plan=Plan()), estimate=estimates.fitting())
    solution = Solution(status="found", question={"gpu": "t4", "gpu_memory_bytes": None}, plans=(found,))
    monkeypatch.setattr(ask, "solve", lambda question, **others: solution)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(tonnage("models", "gpt2", "--config").out)
    assert tonnage("plan", "./mine", "--gpu", "t4", "--save", "plan.toml", "--json").code == 0
    assert planfile.read(tmp_path / "plan.toml").model == str(tmp_path / "mine")


def test_techniques_may_be_named_one_by_one_or_together(tonnage: Any, asked: list[Question]) -> None:
    limits = ["--without", "tp", "--without", "pp,cp", "--allow", "precision,budget"]
    tonnage("plan", "gpt2", "--gpu", "t4", "--offline", *limits)
    (found,) = asked
    assert (found.without, found.only, found.allow) == (("tp", "pp", "cp"), (), ("precision", "budget"))
