"""`tonnage train` as a user runs it, on the CPU, on Python's own documentation."""

import json
import os
import pydoc_data.topics
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
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


def run(folder: Path, words: list[str], start: list[str] = TONNAGE) -> "subprocess.CompletedProcess[str]":
    threads = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*start, *words], cwd=folder, env=threads, capture_output=True, text=True, timeout=120)


def metrics(folder: Path, out: str = "run") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / out / "metrics.jsonl").read_text().splitlines()]


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
    assert float(network(input_ids=ids, labels=ids).loss) < 4.5
