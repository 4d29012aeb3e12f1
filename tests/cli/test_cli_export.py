"""Tests of `tonnage export`: all files or none, none replaced without --force, missing settings are listed."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from lines import is_one_line

import estimates
from conftest import Calls
from tonnage.errors import CannotEstimate
from tonnage.planner import ask
from tonnage.planner.solution import Solution
from tonnage.trainers import reread

PLAN = """
schema_version = 1
model = "gpt2"
gpu = "8xa100-80gb"
[job]
seq_len = 512
[plan]
shard = "zero3"
checkpointing = "selective"
"""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls) -> str:
    """Write a plan into the current folder; nothing is read back by trainers, and every estimate fits."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.toml").write_text(PLAN)
    monkeypatch.setattr(reread, "check", lambda export, to: reread.Checked(versions={"x": "1"}, settings=3))
    return "plan.toml"


def test_files_are_written_and_listed(tonnage: Any, plan: str) -> None:
    ended = tonnage("export", plan, "--to", "hf-trainer")
    assert ended.code == 0
    assert sorted(path.name for path in Path("hf-trainer").iterdir()) == [
        *("job.json", "job.py", "rows.py", "tonnage_plan.toml", "train.py", "training_args.json")
    ]
    assert "Under engine hf-trainer: 60.00 GiB of 80.00 GiB on each GPU" in ended.out
    assert "Read back by x 1: all 3 settings are read as they were written." in ended.out
    assert "torchrun --nproc-per-node 8 train.py" in ended.out
    assert (
        "checkpointing=selective: the Trainer checkpoints every layer or every N-th; written: checkpointing=full"
        in (ended.out)
    )


def test_json(tonnage: Any, plan: str) -> None:
    document = json.loads(tonnage("export", plan, "--to", "hf-trainer", "--json", "--out", "here").out)
    assert document["target"] == "hf-trainer"
    assert document["folder"] == "here"
    assert [item["option"] for item in document["unexpressed"]] == ["checkpointing"]
    assert "tonnage_plan.toml" in document["files"]
    assert document["estimate"]["fits"] is True


def test_the_command_that_estimates_it_again_works(tonnage: Any, plan: str, calls: Calls) -> None:
    """It is printed, takes the exported plan, and is for the trainer's engine."""
    out = tonnage("export", plan, "--to", "hf-trainer", "--out", "a folder").out
    [command] = [line for line in out.splitlines() if line.startswith("  tonnage estimate")]
    ended = tonnage(*shlex.split(command)[1:])
    assert ended.code == 0
    assert calls.plan is not None
    assert (calls.plan.engine, calls.plan.checkpointing, calls.plan.shard) == ("hf-trainer", "full", "zero3")


def test_the_command_that_a_refusal_names_works(tonnage: Any, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(plan).write_text(PLAN.replace("[plan]", 'method = "qlora"\n[plan]'))
    asked: list[Any] = []

    def answer(question: Any, *more: Any, **how: Any) -> Any:
        asked.append(question)
        raise CannotEstimate("Nothing is to be searched.")

    monkeypatch.setattr(ask, "answer", answer)
    error = tonnage("export", plan, "--to", "deepspeed").err
    _, _, command = error.partition("plan without it: ")
    assert "to be searched" in tonnage(*shlex.split(command.strip().removesuffix("."))[1:]).err
    assert asked[0].methods == ("full", "lora")


def test_a_file_in_the_way_is_told_before_anything_is_estimated(tonnage: Any, plan: str, calls: Calls) -> None:
    assert tonnage("export", plan, "--to", "hf-trainer").code == 0
    calls.error = CannotEstimate("Nothing is to be estimated.")
    assert "hf-trainer has tonnage_plan.toml already" in tonnage("export", plan, "--to", "hf-trainer").err


def test_nothing_is_written_where_nothing_fits(
    tonnage: Any, plan: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls.estimate = estimates.full_card()
    nothing = Solution(status="too_large", question={})
    monkeypatch.setattr(ask, "answer", lambda question, *more, **how: nothing)
    ended = tonnage("export", plan, "--to", "hf-trainer")
    assert ended.code == 1
    assert "no plan that hf-trainer can express fits. Nothing was written." in ended.out
    document = json.loads(tonnage("export", plan, "--to", "hf-trainer", "--json").out)
    assert (document["files"], document["estimate"]["fits"]) == ([], False)
    assert not Path("hf-trainer").exists()


def test_without_a_check_it_is_said_that_there_was_none(tonnage: Any, plan: str, calls: Calls) -> None:
    calls.error = CannotEstimate("Nothing is to be estimated.")
    ended = tonnage("export", plan, "--to", "hf-trainer", "--no-check")
    assert ended.code == 0
    assert "Not estimated: --no-check was given." in ended.out


def test_strict_writes_nothing(tonnage: Any, plan: str) -> None:
    ended = tonnage("export", plan, "--to", "hf-trainer", "--strict")
    assert ended.code == 2
    assert is_one_line(ended.err)
    assert "checkpointing=selective" in ended.err
    assert not Path("hf-trainer").exists()
    assert tonnage("export", plan, "--to", "torchrun", "--strict").code == 0


def test_nothing_is_replaced_without_force(tonnage: Any, plan: str) -> None:
    Path("hf-trainer").mkdir()
    Path("hf-trainer/train.py").write_text("mine")
    ended = tonnage("export", plan, "--to", "hf-trainer")
    assert ended.code == 2
    assert "hf-trainer has train.py already" in ended.err
    assert [path.name for path in Path("hf-trainer").iterdir()] == ["train.py"]
    assert Path("hf-trainer/train.py").read_text() == "mine"
    assert tonnage("export", plan, "--to", "hf-trainer", "--force").code == 0
    assert Path("hf-trainer/train.py").read_text() != "mine"


def test_nothing_is_written_if_the_trainer_reads_it_differently(
    tonnage: Any, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(export: Any, to: Any) -> Any:
        raise CannotEstimate("it reads something else.")

    monkeypatch.setattr(reread, "check", check)
    ended = tonnage("export", plan, "--to", "hf-trainer")
    assert ended.code == 3
    assert not Path("hf-trainer").exists()


def test_nothing_is_written_on_a_full_disk(tonnage: Any, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth of five files cannot be written: the first three do not exist either."""
    from tonnage import files
    from tonnage.errors import UnwritableFile

    real, seen = files.open_replacing, []

    def replacing(path: Path) -> Any:
        seen.append(path)
        if len(seen) == 4:
            raise UnwritableFile(f"{path} cannot be written (disk full); nothing was changed.")
        return real(path)

    monkeypatch.setattr(files, "open_replacing", replacing)
    assert tonnage("export", plan, "--to", "hf-trainer").code == 3
    assert not Path("hf-trainer").exists()


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (("nothing.toml", "--to", "hf-trainer"), "nothing.toml", 3),
        (("nothing.toml", "--to", "vllm"), "nothing.toml", 3),
        (("plan.toml", "--to", "jax"), "Unknown target 'jax'; possible: hf-trainer", 2),
        (("plan.toml",), "--to", 2),
        (("plan.toml", "--to", "hf-trainer", "--out", "plan.toml"), "plan.toml is a file", 2),
    ],
)
def test_mistakes_are_one_line(tonnage: Any, plan: str, arguments: Any, message: str, code: int) -> None:
    ended = tonnage("export", *arguments)
    assert ended.code == code
    assert is_one_line(ended.err)
    assert message in ended.err


def test_a_plan_with_unknown_keys_is_refused(tonnage: Any, plan: str) -> None:
    Path("plan.toml").write_text(PLAN + 'shards = "zero2"\n')
    ended = tonnage("export", plan, "--to", "hf-trainer")
    assert ended.code == 2
    assert "unknown key 'shards'" in ended.err
