"""`tonnage tune -- python train.py`: a script in fresh processes, on the CPU and on ghost cards that run out."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tonnage
from tonnage.catalog.devices import parse_cluster
from tonnage.errors import TrialFailed, UsageError
from tonnage.ghost import environment as ghost_environment
from tonnage.report.tuning import render
from tonnage.script.planning import Asked
from tonnage.tuning import scripts
from tonnage.tuning.decisions import Tuned

PROGRAMS = Path(__file__).parents[1] / "programs"
SCRIPT = [sys.executable, str(PROGRAMS / "tunable.py"), "--output_dir", "out"]


def tune(command: list[str], out: Path, gpu: str = "cpu", **options: Any) -> Tuned:
    asked = Asked(command=command, cluster=parse_cluster(gpu), stated={}, timeout_seconds=300.0)
    return scripts.tune_script(asked, out=out, **{"steps": 3, "trials": 3, **options})


def ghost(total_bytes: int, gpus: int = 1) -> dict[str, str]:
    return ghost_environment.environment(inherit=os.environ, total_bytes=total_bytes, devices=gpus)


def test_a_script_is_grown_by_its_own_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--use_cpu", "True", "--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "2"]
    found = tune([*SCRIPT, *flags, "--eval_rows", "20", "--long", "64"], tmp_path / "tuned")
    first, second = found.trials
    assert [trial.outcome.moment for trial in found.trials] == ["save", "save"], found.trials
    assert first.candidate is not None
    assert first.changed is not None
    assert second.changed is not None
    assert second.candidate == replace(first.candidate, job=replace(first.candidate.job, micro_batch=2, grad_accum=1))
    assert second.changed.command[len(SCRIPT) :][:6] == (*flags[:3], "2", flags[4], "1")
    assert second.not_taken == ()
    assert first.outcome.tokens_per_second == pytest.approx(2 * 32 / first.outcome.step_seconds)  # type: ignore[operator]
    assert [path.name for path in tmp_path.iterdir()] == ["tuned"]  # what trials save is gone, "out" was never made
    page = render(found)
    assert "the script as it is" in page
    assert found.best is not None
    assert found.best.changed is not None
    assert found.best.changed.line in page
    monkeypatch.setenv("PATH", "/nowhere")
    assert tune([*SCRIPT, *flags, "--eval_rows", "20", "--long", "64"], tmp_path / "tuned") == found  # starts nothing


def test_a_loop_of_its_own_is_timed_as_it_is(tmp_path: Path) -> None:
    found = tune([*SCRIPT, "--loop"], tmp_path / "tuned")
    [trial] = found.trials
    assert trial.candidate is None
    assert (trial.outcome.ended, trial.outcome.moment) == ("finished", "step 6")  # three of five were timed
    assert "no plan can be made for it" in found.seen
    assert "steps/s" not in render(found)
    assert json.loads(json.dumps(found.to_json()))["trials"][0]["command"] == [*SCRIPT, "--loop"]


def test_batches_of_a_loop_around_an_accelerator_stay(tmp_path: Path) -> None:
    found = tune([sys.executable, str(PROGRAMS / "accelerated.py")], tmp_path / "tuned")
    [trial] = found.trials
    assert trial.outcome.holds
    assert trial.candidate is not None
    assert (trial.candidate.job.micro_batch, trial.candidate.job.grad_accum) == (4, 2)


def test_python_takes_the_words_of_a_command(tmp_path: Path) -> None:
    with pytest.raises(TrialFailed, match="the data are not there"):
        tonnage.tune([*SCRIPT, "--use_cpu", "True", "--fails"], out=tmp_path / "tuned", gpu="cpu")
    with pytest.raises(UsageError, match="--seq-len is set by the script itself"):
        tonnage.tune([*SCRIPT], out=tmp_path / "tuned", gpu="cpu", seq_len=64)


def test_a_script_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(TrialFailed, match="failed at load: ValueError: the data are not there"):
        tune([*SCRIPT, "--use_cpu", "True", "--fails"], tmp_path / "tuned")
    with pytest.raises(UsageError, match="leave -I out"):
        tune([sys.executable, "-I", *SCRIPT[1:]], tmp_path / "again")


@pytest.mark.ghost
def test_a_card_that_runs_out_gets_smaller_batches(
    tmp_path: Path, torch_build: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts, "_predict", lambda *_: [])  # a search of plans, which has tests of its own
    flags = ["--per_device_train_batch_size", "256", "--max_grad_norm", "0"]
    MEMORY = 120 * 2**20
    found = tune([*SCRIPT, *flags], tmp_path / "tuned", "a100-40gb", trials=5, variables=ghost(MEMORY))
    first, second = found.trials[:2]
    assert (first.outcome.ended, first.outcome.moment) == ("out_of_memory", "step 1"), first.outcome
    assert second.why == "out of memory: micro-batch 128"
    assert found.best is not None, found.trials
    assert found.best.outcome.capacity_bytes == MEMORY


@pytest.mark.ghost
@pytest.mark.parametrize(
    ("flags", "moment"),
    [
        (["--long", "100000"], "longest rows"),
        (["--eval_rows", "3000", "--per_device_eval_batch_size", "3000"], "evaluation"),
    ],
)
def test_memory_may_run_out_later(
    flags: list[str], moment: str, tmp_path: Path, torch_build: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts, "_predict", lambda *_: [])
    command = [*SCRIPT, "--per_device_train_batch_size", "1", "--max_grad_norm", "0", *flags]
    found = tune(command, tmp_path / "tuned", "a100-40gb", trials=1, variables=ghost(128 * 2**20))
    assert (found.trials[0].outcome.ended, found.trials[0].outcome.moment) == ("out_of_memory", moment)
