"""`tonnage train` as a user runs it, on the CPU, on Python's own documentation."""

import json
import os
import pydoc_data.topics
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from commands import TONNAGE

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, **SIZES}
PLAN = """
schema_version = 1
model = "config.json"
gpu = "{gpu}"

[job]
seq_len = 64
micro_batch = 2
grad_accum = 2

[plan]
precision = "fp32"
clip_grad_norm = 1.0
shard = "{shard}"
"""
NONE: Mapping[str, str] = {}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a plan, a configuration and a text."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "plan.toml").write_text(PLAN.format(gpu="cpu", shard="none"))
    (tmp_path / "docs.txt").write_text("\n\n".join(pydoc_data.topics.topics.values())[:60_000])
    return tmp_path


def options(out: str = "run", **others: Any) -> list[str]:
    words = ["train", "plan.toml", "--model", "config.json", "--data", "docs.txt", "--out", out, "--lr", "0.003"]
    for name, value in others.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def run(
    folder: Path, words: list[str], start: list[str] = TONNAGE, variables: Mapping[str, str] = NONE
) -> "subprocess.CompletedProcess[str]":
    own = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run([*start, *words], cwd=folder, env=own, capture_output=True, text=True, timeout=120)


def metrics(folder: Path, out: str = "run") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / out / "metrics.jsonl").read_text().splitlines()]


def test_a_dry_run_writes_nothing_of_its_own(folder: Path) -> None:
    """Else its second try, or the run itself, would find --out in use.  Saves are the ghost's affair."""
    words = options(max_steps=2, save_every=2, warmup_steps=9)
    done = run(folder, words, variables={"GHOST_DEVICES": "1"})
    assert done.returncode == 0, done.stderr
    assert "the run of 2 steps ends within its warm-up of 9: --lr is never reached" in " ".join(done.stderr.split())
    assert "step 2/2" in done.stderr
    assert sorted(path.name for path in (folder / "run").iterdir()) == ["checkpoints", "final"]


def test_a_run_on_text_learns_and_ends_with_a_folder_that_loads(folder: Path) -> None:
    done = run(folder, [*options(max_steps=40, eval_every=20), "--json"])
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["steps"] == 40
    assert answer["final"] == "run/final"
    lines = metrics(folder)
    assert [line["step"] for line in lines] == list(range(1, 41))
    assert lines[-1]["loss"] < lines[0]["loss"] - 1
    assert sum(line["tokens"] != 4 * 63 for line in lines) <= 1  # the last sequence is padded
    assert [line["step"] for line in lines if line["evaluation_loss"] is not None] == [20, 40]
    assert lines[-1]["evaluation_loss"] == answer["evaluation_loss"]
    assert "bytes as tokens" in done.stderr
    network = AutoModelForCausalLM.from_pretrained(folder / "run" / "final")
    ids = torch.tensor([list(b"The import statement combines two operations")])
    with torch.no_grad():
        assert float(network(input_ids=ids, labels=ids).loss) < 4.5


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tonnage"]


def test_the_learning_rate_follows_its_schedule_under_an_optimizer_of_torchao(folder: Path) -> None:
    pytest.importorskip("torchao")
    plan = folder / "plan.toml"
    plan.write_text(plan.read_text() + 'optimizer = "adamw-8bit-ao"\n')
    words = options(max_steps=4, warmup_steps=2, schedule="wsd", decay_steps=2)
    eagerly = {"TORCHDYNAMO_DISABLE": "1"}  # else its update is compiled, for a minute
    done = run(folder, words, variables=eagerly)
    assert done.returncode == 0, done.stderr
    assert [line["learning_rate"] for line in metrics(folder)] == pytest.approx([0.0015, 0.003, 0.003, 0.0015])


def start(folder: Path, words: list[str]) -> "subprocess.Popen[str]":
    threads = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen([*TONNAGE, *words], cwd=folder, env=threads, stdout=pipe, stderr=pipe, text=True)


def wait_for_steps(folder: Path, out: str, steps: int) -> None:
    """Return when a run has written so many lines, or fail after a minute."""
    file, end = folder / out / "metrics.jsonl", time.monotonic() + 60
    while not file.exists() or file.read_text().count("\n") < steps:
        assert time.monotonic() < end
        time.sleep(0.01)


def without_seconds(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    timed = ("step_seconds", "tokens_per_second")
    return [{name: value for name, value in line.items() if name not in timed} for line in lines]


def test_runs_that_were_killed_and_stopped_continue_exactly(folder: Path) -> None:
    steps = {"max_steps": 120, "save_every": 30, "eval_every": 60, "keep": 2}
    assert run(folder, options("whole", **steps)).returncode == 0
    killed = start(folder, options("killed", **steps))
    wait_for_steps(folder, "killed", 35)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    stopped = start(folder, options("killed", resume=True, **steps))
    wait_for_steps(folder, "killed", 75)
    stopped.send_signal(signal.SIGTERM)
    output, messages = stopped.communicate()
    assert stopped.returncode == 130, messages
    assert "continue with --resume" in output
    assert "resumed killed/checkpoints/step-" in messages
    done = len(metrics(folder, "killed"))
    assert 75 <= done < 120
    assert (folder / "killed" / "checkpoints" / f"step-{done}").is_dir()
    last = run(folder, options("killed", resume=True, **steps))
    assert last.returncode == 0, last.stderr
    assert without_seconds(metrics(folder, "killed")) == without_seconds(metrics(folder, "whole"))
    weights = [load_file(folder / out / "final" / "model.safetensors") for out in ("killed", "whole")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
    names = sorted(path.name for path in (folder / "whole" / "checkpoints").iterdir())
    assert "step-120" in names
    assert len(names) <= 3  # two, and the best


def test_two_ranks_equal_one_and_one_continues_what_two_began(folder: Path) -> None:
    two = PLAN.format(gpu="2xcpu", shard="zero3").replace("grad_accum = 2", "grad_accum = 1")
    (folder / "two.toml").write_text(two)
    steps = {"schedule": "constant", "warmup_steps": 2, "eval_every": 6}
    one = run(folder, options("one", max_steps=12, **steps))
    assert one.returncode == 0, one.stderr
    words = [word if word != "plan.toml" else "two.toml" for word in options("two", max_steps=6, **steps)]
    both = run(folder, words, TORCHRUN)
    assert both.returncode == 0, both.stderr
    assert both.stdout.count("two/final") == 1
    again = run(folder, options("two", max_steps=12, resume=True, **steps))
    assert again.returncode == 0, again.stderr
    assert "12 steps instead of 6" in again.stderr
    expected, found = metrics(folder, "one"), metrics(folder, "two")
    assert [line["tokens"] for line in found] == [line["tokens"] for line in expected]
    for name in ("loss", "gradient_norm", "learning_rate"):
        assert [line[name] for line in found] == pytest.approx([line[name] for line in expected], rel=1e-5)
    assert found[-1]["evaluation_loss"] == pytest.approx(expected[-1]["evaluation_loss"], rel=1e-5)
