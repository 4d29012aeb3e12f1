"""Tests of `tonnage plan --from FILE`: the file reaches the search and the estimate, and changes are advised."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lines import is_one_line

import estimates
from tonnage.job import Job
from tonnage.planner import ask
from tonnage.planner.solution import Candidate, Choice, Solution
from tonnage.plans import Plan

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "reduce_bucket_size": 1000},
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Record what the search was asked; it answers with stage 2 and full checkpointing."""
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text(json.dumps(CONFIG))
    recorded: dict[str, Any] = {}

    def solve(question: Any, **others: Any) -> Solution:
        recorded["question"] = question
        job = Job(model=question.job.model, seq_len=512, micro_batch=2)
        best = Candidate(job=job, plan=Plan(engine="deepspeed", shard="zero2", checkpointing="full"))
        choice = Choice(name="best", candidate=best, estimate=estimates.fitting())
        return Solution(status="found", question={}, plans=(choice,))

    monkeypatch.setattr(ask, "solve", solve)
    return recorded


def test_the_file_is_run_and_changes_are_advised(tonnage: Any, calls: Any, asked: Any) -> None:
    ended = tonnage("plan", "gpt2", "--gpu", "8xa100-80gb", "--seq-len", "512", "--from", "ds_config.json", "--json")
    assert ended.code == 0
    given = json.loads(ended.out)["given"]
    assert (calls.plan.shard, calls.plan.param_offload, calls.plan.engine) == ("zero3", "cpu", "deepspeed")
    assert (calls.job.seq_len, calls.job.micro_batch) == (512, 2)
    assert (asked["question"].plan.shard, asked["question"].plan.engine) == ("none", "deepspeed")
    assert asked["question"].job.micro_batch == 2
    assert given["not_understood"] == ["zero_optimization.reduce_bucket_size = 1000"]
    changes = {change["key"]: (change["before"], change["after"]) for change in given["changes"]}
    assert changes["zero_optimization.stage"] == (3, 2)
    assert changes["zero_optimization.offload_param.device"] == ("cpu", None)
    assert changes["job.checkpointing"] == (None, "full")
    assert "job.seq_len" not in changes
    assert "zero_optimization.offload_param.pin_memory" not in changes  # the file does not mention it


def test_find_runs_the_file_on_the_gpus_that_it_answers(
    tonnage: Any, calls: Any, asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def four(find: str, question: Any, **others: Any) -> Solution:
        return replace(ask.solve(question), question={"gpu": "4xa100-80gb", "gpu_memory_bytes": None})

    monkeypatch.setattr(ask, "find_limit", four)
    command = ("plan", "gpt2", "--gpu", "a100-80gb", "--find", "min-gpus", "--seq-len", "512")
    assert tonnage(*command, "--from", "ds_config.json", "--json").code == 0
    assert str(calls.cluster) == "4xa100-80gb"


def test_an_unknown_file_is_refused_in_one_line(tonnage: Any, asked: Any) -> None:
    Path("x.json").write_text("{}")
    ended = tonnage("plan", "gpt2", "--gpu", "t4", "--from", "x.json")
    assert ended.code == 3
    assert is_one_line(ended.err)
    assert "no key by which" in ended.err


def test_a_setting_under_its_older_name_is_left_out_and_an_equal_one_is_no_change(
    tonnage: Any, calls: Any, asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plain(question: Any, **others: Any) -> Solution:
        plan = Plan(engine="hf-trainer", shard="zero2", optimizer="adamw-fused")
        best = Candidate(job=Job(model=question.job.model, seq_len=512, micro_batch=2), plan=plan)
        choice = Choice(name="best", candidate=best, estimate=estimates.fitting())
        return Solution(status="found", question={}, plans=(choice,))

    monkeypatch.setattr(ask, "solve", plain)
    arguments = {"per_device_train_batch_size": 2, "bf16": True, "optim": "adamw_torch_fused", "fsdp": "full_shard"}
    Path("args.json").write_text(json.dumps({**arguments, "gradient_checkpointing": True}))
    ended = tonnage("plan", "gpt2", "--gpu", "8xa100-80gb", "--seq-len", "512", "--from", "args.json", "--json")
    changes = {
        change["key"]: (change["before"], change["after"]) for change in json.loads(ended.out)["given"]["changes"]
    }
    assert changes["gradient_checkpointing"] == (True, None)
    assert "activation_checkpointing" not in changes
    assert "optim" not in changes


def test_an_option_given_with_its_default_value_overrides_the_file(tonnage: Any, calls: Any, asked: Any) -> None:
    options = ("--json", "--seq-len", "2048", "--micro-batch", "1")
    assert tonnage("plan", "smollm2-135m", "--gpu", "8xa100-80gb", "--from", "ds_config.json", *options).code == 0
    assert (calls.job.seq_len, calls.job.micro_batch) == (2048, 1)
    assert asked["question"].job.micro_batch == 1


HARMFUL = "\x1b]0;owned\x07\x1b[2J\u202e"


@pytest.mark.parametrize(
    "change",
    [
        {HARMFUL: 5},
        {"zero_optimization": {"stage": 3, HARMFUL: 5}},
        {"zero_optimization": {"stage": HARMFUL}},
        {"optimizer": {"type": HARMFUL}},
        {"comment": HARMFUL},
        {"activation_checkpointing": {HARMFUL: HARMFUL}},
    ],
    ids=str,
)
def test_no_text_of_the_file_reaches_the_terminal_as_it_is(
    change: dict[str, Any], tonnage: Any, calls: Any, asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tonnage.report.plans.render", lambda solution, **view: "")
    Path("ds_config.json").write_text(json.dumps({**CONFIG, **change}))
    ended = tonnage("plan", "gpt2", "--gpu", "8xa100-80gb", "--seq-len", "512", "--from", "ds_config.json")
    shown = ended.out + ended.err
    assert "owned" in shown
    assert [letter for letter in shown if not letter.isprintable() and letter != "\n"] == []
