"""The commands that exports print: a shell reads them, and the launchers' own parsers take their words."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from networks import TINY, tiny_job
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.ghost.wheel import Torch
from tonnage.planner import exporting
from tonnage.plans import Plan
from tonnage.script import dry_run
from tonnage.trainers import targets
from tonnage.trainers.cases import request

LLAMA, _ = request("llama-3.1-8b", seq_len=32)

WHERE: list[tuple[str, dict[str, Any]]] = [
    ("a100-80gb", {"allocator": "expandable"}),
    ("8xa100-80gb", {"shard": "ddp"}),
    ("8xa100-80gb", {"shard": "zero3", "param_offload": "cpu"}),
    ("2x8xa100-80gb", {"shard": "zero3", "allocator": "expandable"}),
]

PROGRAM = """
import json, sys
from accelerate.commands.launch import launch_command_parser
from deepspeed.launcher.runner import parse_args
from torch.distributed.run import get_args_parser
parsers = {
    "torchrun": lambda words: get_args_parser().parse_args(words),
    "accelerate": lambda words: launch_command_parser().parse_args(words[1:]),
    "deepspeed": parse_args,
}
for name, *words in json.loads(sys.stdin.read()):
    parsed = vars(parsers[name](words))
    print(parsed.get("training_script", parsed.get("user_script")))
"""
"""Parses each command and prints the script that it found."""

STANDING_FOR = {"MACHINE": "1"}
"""Values of the words that stand for something in commands."""


def commands() -> list[str]:
    """Return the commands of all targets for one GPU, one machine and several."""
    return [
        targets.export_plan(Case(job, Plan(**plan), parse_cluster(gpus)), "gpt2", target).command
        for target in targets.TARGETS
        for gpus, plan in WHERE
        for job in (LLAMA if target.name in ("torchtitan", "megatron-bridge") else tiny_job(),)
    ]


def words_of(command: str) -> list[str]:
    """Return the words of a command, without those that set variables."""
    words = [STANDING_FOR.get(word, word) for word in shlex.split(command)]
    if words[0] == "env":
        words = words[1:]
        while "=" in words[0]:
            words = words[1:]
    return words


def test_a_shell_reads_every_command() -> None:
    for command in commands():
        subprocess.run(["bash", "-n", "-c", command], check=True)


def test_launchers_take_every_command() -> None:
    launched = [words_of(command) for command in commands()]
    others = {words[0] for words in launched} - {"torchrun", "accelerate", "deepspeed"}
    assert others == {"python", "axolotl", "llamafactory-cli"}
    parsed = [words for words in launched if words[0] not in others]
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(parsed),
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    scripts = ended.stdout.split()[-len(parsed) :]
    for words, script in zip(parsed, scripts, strict=True):
        assert script in words, words
        assert script.endswith(".py") or words[words.index(script) - 1] == "-m"


def test_a_job_of_nearest_settings_needs_what_was_estimated(
    torch_build: Torch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exported command is run as its user would, on a ghost."""
    monkeypatch.chdir(tmp_path)
    config = {**TINY["gpt2"], "architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    job, plan = request(str(tmp_path), offline=True, seq_len=24, checkpointing="attention-module", loss="chunked")
    case = Case(job, plan, parse_cluster("a100-80gb"))
    prepared = exporting.prepare(case, str(tmp_path), targets.find_target("hf-trainer"), offline=True)
    assert prepared.export is not None
    assert prepared.estimate is not None
    written = {item.option: item.instead for item in prepared.export.unexpressed}
    assert written == {"checkpointing": "full", "loss": "plain"}  # GPT-2 has no kernels of Liger's
    for item in prepared.export.files:
        (tmp_path / item.name).write_text(item.text)
    _, *words = shlex.split(prepared.export.command)
    ran = dry_run.run([sys.executable, *words, "--random-weights"], case.cluster, seconds=False).estimate
    assert ran.fits
    assert ran.peak.allocated_bytes == prepared.estimate.peak.allocated_bytes
