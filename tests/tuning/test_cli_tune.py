"""`tonnage tune` on the CPU, from a plan file to the fastest plan, and what it teaches later estimates."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tonnage
from networks import TINY, tiny_job
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.errors import CannotEstimate, UsageError
from tonnage.estimates import history
from tonnage.planner import plan_file
from tonnage.planner.solution import Candidate
from tonnage.plans import Plan
from tonnage.tuning import here
from tonnage.tuning.decisions import Trial
from tonnage.tuning.outcome import Outcome

PLAN = """schema_version = 1
model = "config.json"
gpu = "cpu"
[job]
seq_len = 24
micro_batch = 1
grad_accum = 2
[plan]
precision = "fp32"
"""


def tune(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tonnage", "tune", *words, "--out", "tuned", "--steps", "5"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_fastest_plan_is_saved_and_a_second_run_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY["llama"]))
    (tmp_path / "plan.toml").write_text(PLAN)
    done = tune(tmp_path, "plan.toml", "--json", "--save", "best.toml")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["trials"][0]["micro_batch"] == 1
    speeds = [trial["outcome"]["tokens_per_second"] for trial in document["trials"]]
    assert document["best"] == speeds.index(max(speeds))
    best = document["trials"][document["best"]]
    assert plan_file.read(tmp_path / "best.toml").options["micro_batch"] == best["micro_batch"]
    again = tune(tmp_path, "plan.toml", "--json")
    assert json.loads(again.stdout) == document  # the same seconds: nothing was run


def test_what_cannot_be_measured_here_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN.replace('"cpu"', '"h100-80gb"'))
    for words in (("plan.toml",), ("smollm2-135m", "--gpu", "h100-80gb"), ("nothing.toml",)):
        done = tune(tmp_path, *words)
        assert done.returncode in (2, 3)
        assert done.stderr.count("\n") == 1
        assert not done.stdout
    with pytest.raises(UsageError, match="trials"):
        tonnage.tune("smollm2-135m", out=tmp_path, gpu="cpu", trials="many")


def trial(**changes: Any) -> Trial:
    outcome = Outcome(ended="finished", moment="save", step_seconds=3.0, tokens_per_second=1.0)
    candidate = Candidate(job=replace(tiny_job("llama"), micro_batch=1), plan=Plan())
    return Trial(candidate=candidate, why="predicted 1", outcome=replace(outcome, **changes))


def test_what_is_measured_corrects_later_estimates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(history, "file", lambda: tmp_path / "history.sqlite")
    estimate = SimpleNamespace(time={"step_seconds": 2.0}, versions={"torch": "2.13.0"})
    monkeypatch.setattr(here, "predict", lambda case: SimpleNamespace(estimate=estimate))
    cluster = parse_cluster("a100-40gb")
    one, other = here.compare([trial(), trial(ended="out_of_memory", step_seconds=None)], cluster, lambda text: None)
    assert one.predicted_seconds == other.predicted_seconds == 2.0
    found = history.find_correction(Case(one.candidate.job, one.candidate.plan, cluster), "2.13.0")
    assert found == history.Correction(ratio=1.5, measurements=1, same=True)


def test_a_trial_without_a_prediction_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(case: Case) -> None:
        raise CannotEstimate("no ghost runs here")

    monkeypatch.setattr(here, "predict", refuse)
    [found] = here.compare([trial()], parse_cluster("a100-40gb"), lambda text: None)
    assert found.unpredicted == "no ghost runs here"
    assert found.predicted_seconds is None


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ('engine = "deepspeed"', "tune measures plans of the engine tonnage, and this one is for deepspeed"),
        ('engine = "megatron"', "and this one is for megatron; export it"),
        ('precision = "fp16-true"', "fp16-true cannot train all weights"),
        ('attention = "flash"', "it is a kernel of GPUs"),
    ],
)
def test_plans_that_nothing_here_would_train_are_refused(option: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY["llama"]))
    text = PLAN.replace('precision = "fp32"', option) if "precision" in option else PLAN + option
    (tmp_path / "plan.toml").write_text(text.replace('"config.json"', f'"{tmp_path / "config.json"}"'))
    with pytest.raises(UsageError, match=message):
        tonnage.tune(str(tmp_path / "plan.toml"), out=tmp_path / "tuned")
