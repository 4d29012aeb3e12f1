"""The commands that exports print: a shell reads them, and the launchers' own parsers take their words."""

import json
import os
import shlex
import subprocess
import sys
from typing import Any

from networks import tiny_job
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.plans import Plan
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
