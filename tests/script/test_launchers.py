"""Tests of launchers: one rank of a distributed job runs without its launcher."""

import pytest

from tonnage.catalog.devices import parse_cluster
from tonnage.errors import UsageError
from tonnage.script import launchers


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (["python", "-I", "train.py"], "-I"),
        (["env", "A=1", "/usr/bin/python3.11", "-X", "dev", "-uE", "train.py"], "-E"),
        (["python", "-S", "-m", "train"], "-S"),
        (["python", "-W", "Ignore", "-Xdev", "-O", "train.py", "-I"], None),
        (["python", "-m", "train", "-I"], None),
        (["python", "-c", "print()", "-E"], None),
        (["./train.sh", "-S"], None),
    ],
)
def test_flags_that_shut_out_the_ghost_are_named(command: list[str], flag: str | None) -> None:
    assert launchers.find_isolating_flag(command) == flag


ACCELERATE = ["--num_processes", "8", "--use_fsdp", "train.py", "--lr", "1"]


@pytest.mark.parametrize(
    ("command", "script"),
    [
        (["python", "train.py", "--a"], ["train.py", "--a"]),
        (["torchrun", "--nproc-per-node", "8", "train.py"], ["train.py"]),
        (["python", "-m", "torch.distributed.run", "train.py"], ["train.py"]),
        (["python", "-m", "package.train", "x"], ["-m", "package.train", "x"]),
        (["torchrun", "-m", "package.train"], ["-m", "package.train"]),
        (
            ["deepspeed", "--no_local_rank", "train.py", "--deepspeed", "c.json"],
            ["train.py", "--deepspeed", "c.json"],
        ),
    ],
)
def test_the_script_of_a_command(command: list[str], script: list[str]) -> None:
    assert launchers.without_launcher(command) == script
    name = script[1] if script[0] == "-m" else script[0]
    assert launchers.program(command) == name
    alone, variables = launchers.make_rank_command(command, "python3", 9, parse_cluster("2x8xt4"), {})
    assert alone == ["python3", *script]
    assert {name: variables[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE")} == {
        "RANK": "9",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "WORLD_SIZE": "16",
    }


@pytest.mark.parametrize(
    ("command", "started"),
    [
        ("deepspeed --num_gpus 8 train.py --deepspeed c.json", "train.py --local_rank=1 --deepspeed c.json"),
        ("/opt/bin/deepspeed --num_gpus 8 -m pack.train x", "-m pack.train --local_rank=1 x"),
        ("python -m torch.distributed.launch --nproc-per-node 8 train.py x", "train.py --local-rank=1 x"),
        ("python -m torch.distributed.launch --use-env train.py x", "train.py x"),
        ("python train.py deepspeed", "train.py deepspeed"),
    ],
)
def test_launchers_pass_the_local_rank_as_an_argument(command: str, started: str) -> None:
    alone, _ = launchers.make_rank_command(command.split(), "python3", 9, parse_cluster("2x8xt4"), {})
    assert alone == ["python3", *started.split()]


@pytest.mark.parametrize(
    "launcher",
    [["accelerate", "launch"], ["/bin/accelerate-launch"], ["python", "-m", "accelerate.commands.launch"]],
)
def test_arguments_of_accelerate_launch_are_found(launcher: list[str]) -> None:
    assert launchers._find_accelerate_arguments([*launcher, *ACCELERATE]) == ACCELERATE
    assert launchers._find_accelerate_arguments(["python", "train.py", *launcher]) is None


def test_command_and_variables_of_accelerate_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Printed:
        stdout = 'noise\n{"command": ["train.py"], "variables": {"ACCELERATE_USE_FSDP": "true", "RANK": "0"}}\n'
        stderr = ""

    monkeypatch.setattr(launchers.subprocess, "run", lambda *args, **kwargs: Printed)
    command, variables = launchers.make_rank_command(
        ["accelerate", "launch", "train.py"], "python3", 1, parse_cluster("2xt4"), {}
    )
    assert command == ["python3", "train.py"]
    assert (variables["ACCELERATE_USE_FSDP"], variables["RANK"]) == ("true", "1")
    Printed.stdout, Printed.stderr = "", "ValueError: unknown option --fsdpp\n"
    with pytest.raises(UsageError, match="unknown option --fsdpp"):
        launchers.make_rank_command(["accelerate", "launch", "train.py"], "python3", 1, parse_cluster("2xt4"), {})


@pytest.mark.parametrize(
    ("command", "after"),
    [
        ("accelerate launch train.py --x 1", "accelerate launch --mixed_precision bf16 train.py --x 1"),
        (
            "accelerate launch --mixed_precision fp16 --num_processes 2 train.py",
            "accelerate launch --num_processes 2 --mixed_precision bf16 train.py",
        ),
        (
            "accelerate launch --mixed-precision=no -m pack.train --mixed_precision no",
            "accelerate launch --mixed_precision bf16 -m pack.train --mixed_precision no",
        ),
        (
            "python -m accelerate.commands.launch train.py",
            "python -m accelerate.commands.launch --mixed_precision bf16 train.py",
        ),
    ],
)
def test_a_flag_of_accelerate_launch_is_set(command: str, after: str) -> None:
    assert launchers.is_accelerated(command.split())
    assert launchers.set_accelerate_flag(command.split(), "--mixed_precision", "bf16") == after.split()


@pytest.mark.parametrize("command", ["python accelerate.py", "torchrun x.py", "python x.py accelerate launch"])
def test_other_commands_are_not_accelerate_launch(command: str) -> None:
    assert not launchers.is_accelerated(command.split())
