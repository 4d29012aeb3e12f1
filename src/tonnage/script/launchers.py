"""Launchers of distributed jobs (torchrun, accelerate launch, deepspeed): find the script, run one rank without them.

torchrun --nproc-per-node 8 train.py --lr 1    ->    python train.py --lr 1, with RANK=0 WORLD_SIZE=8 ...
"""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tonnage.cluster import Cluster
from tonnage.errors import UsageError

_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "deepspeed")
"""Launchers that are started with `python -m`."""


def make_rank_command(
    command: list[str], python: str, rank: int, cluster: Cluster, variables: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return the command line that runs one rank under `python`, and its variables besides the ghost's `variables`.

    Raises UsageError if the rank does not exist or no script is found.
    """
    own_variables = rank_variables(rank, cluster)
    arguments = _find_accelerate_arguments(command)
    if arguments is None:
        script = without_launcher(command)
        launcher, name = command[: len(command) - len(script)], 2 if script[0] == "-m" else 1
        added = _launcher_arguments(launcher, own_variables["LOCAL_RANK"])
        return [python, *script[:name], *added, *script[name:]], own_variables
    unwatched = {name: value for name, value in variables.items() if name != "TONNAGE_OUT"}
    process = subprocess.run(
        [python, "-P", "-m", "tonnage_inside.accelerated", *arguments], env=unwatched, capture_output=True, text=True
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith("{")]
    if not lines:
        reason = (process.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise UsageError(
            f"accelerate launch does not tell which command it would start ({reason}); --rank needs that."
        )
    start = json.loads(lines[-1])
    return [python, *start["command"]], {**start["variables"], **own_variables}


def _launcher_arguments(launcher: list[str], local_rank: str) -> list[str]:
    """Return the arguments that a launcher puts before the script's own, unless told not to.

    Sources: deepspeed/launcher/launch.py, torch/distributed/launch.py.
    """
    if any(Path(word).name == "deepspeed" for word in launcher) and "--no_local_rank" not in launcher:
        return [f"--local_rank={local_rank}"]
    if "torch.distributed.launch" in launcher and not {"--use-env", "--use_env"} & set(launcher):
        return [f"--local-rank={local_rank}"]
    return []


def rank_variables(rank: int, cluster: Cluster) -> dict[str, str]:
    """Return the variables that torchrun would set for this rank, and one that says that it runs alone.

    Raises UsageError if the rank does not exist.
    """
    if not 0 <= rank < cluster.gpus:
        raise UsageError(f"Rank {rank} does not exist: the cluster has ranks 0 to {cluster.gpus - 1}.")
    return {
        "TONNAGE_ALONE": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % cluster.gpus_per_node),
        "GROUP_RANK": str(rank // cluster.gpus_per_node),
        "WORLD_SIZE": str(cluster.gpus),
        "LOCAL_WORLD_SIZE": str(cluster.gpus_per_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def without_launcher(command: list[str]) -> list[str]:
    """Return the script and its arguments, as the launcher would pass them to Python.  Raises UsageError for none."""
    for index, word in enumerate(command):
        if word.endswith(".py"):
            return command[index:]
        if word == "-m" and index + 1 < len(command) and command[index + 1] not in _MODULES:
            return command[index:]
    raise UsageError(f"{' '.join(command)!r} has no script (a .py file or -m module); --rank needs one.")


def is_launched(command: list[str]) -> bool:
    """Return True if a launcher starts the script: torchrun, accelerate launch, deepspeed, or torch's module."""
    names = ("torchrun", "accelerate", "accelerate-launch", "deepspeed")
    for word in command:
        if Path(word).name in names or word in _MODULES:
            return True
        if word.endswith(".py"):
            return False
    return False


def find_isolating_flag(command: list[str]) -> str | None:
    """Return the flag that keeps the command's Python from PYTHONPATH or sitecustomize: -I, -E, -S, or None."""
    words = iter(command)
    if not any(Path(word).name.startswith("python") for word in words):
        return None
    for word in words:
        if not word.startswith("-") or word[1:2] in ("m", "c", ""):
            return None
        if word[1:2] in ("X", "W"):
            if len(word) == 2:
                next(words, None)
        elif not word.startswith("--") and (letter := next((each for each in "IES" if each in word), None)):
            return f"-{letter}"
    return None


def program(command: list[str]) -> str:
    """Return the name of the script or module that the command runs, without its path."""
    try:
        words = without_launcher(command)
    except UsageError:
        words = command
    return Path(words[1] if words[0] == "-m" else words[0]).name


def is_accelerated(command: Sequence[str]) -> bool:
    """Return True if `accelerate launch` starts the script."""
    return _find_accelerate_arguments(list(command)) is not None


def set_accelerate_flag(command: Sequence[str], flag: str, value: str) -> list[str]:
    """Return a command of `accelerate launch` with one flag of the launcher set to a value."""
    words = list(command)
    arguments = _find_accelerate_arguments(words)
    assert arguments is not None
    begin = len(words) - len(arguments)
    end = len(words) - len(without_launcher(arguments))
    kept, rest = words[:begin], iter(words[begin:end])
    for word in rest:
        name, equals, _ = word.partition("=")
        if name.replace("-", "_") != flag.replace("-", "_"):
            kept.append(word)
        elif not equals:
            next(rest, None)
    return [*kept, flag, value, *words[end:]]


def _find_accelerate_arguments(command: list[str]) -> list[str] | None:
    """Return the arguments of `accelerate launch` in a command line, or None for another command."""
    for index, word in enumerate(command):
        if Path(word).name == "accelerate" and command[index + 1 : index + 2] == ["launch"]:
            return command[index + 2 :]
        if word == "accelerate.commands.launch" or Path(word).name == "accelerate-launch":
            return command[index + 1 :]
        if word.endswith(".py"):
            return None
    return None
