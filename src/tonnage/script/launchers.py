"""Launchers of distributed jobs (torchrun, accelerate launch, deepspeed): one rank of the job without them."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tonnage.cluster import Cluster
from tonnage.errors import UsageError

_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "deepspeed")


def alone(
    command: list[str], python: str, rank: int, cluster: Cluster, variables: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The command line that runs one rank under `python`, and what it needs besides the ghost's `variables`.

    Raises UsageError when the rank does not exist or no script is found.
    """
    said = rank_variables(rank, cluster)
    arguments = _of_accelerate(command)
    if arguments is None:
        script = without_launcher(command)
        before, name = command[: len(command) - len(script)], 2 if script[0] == "-m" else 1
        return [python, *script[:name], *_added(before, said["LOCAL_RANK"]), *script[name:]], said
    unwatched = {name: value for name, value in variables.items() if name != "TONNAGE_OUT"}
    started = subprocess.run(
        [python, "-P", "-m", "tonnage_inside.accelerated", *arguments], env=unwatched, capture_output=True, text=True
    )
    lines = [line for line in started.stdout.splitlines() if line.startswith("{")]
    if not lines:
        reason = (started.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UsageError(f"accelerate launch does not say what it would start ({reason}); --rank needs that.")
    asked = json.loads(lines[-1])
    return [python, *asked["command"]], {**asked["variables"], **said}


def _added(launcher: list[str], local_rank: str) -> list[str]:
    """What launchers put before the script's own arguments, unless told not to (deepspeed/launcher/launch.py,
    torch/distributed/launch.py)."""
    if any(Path(word).name == "deepspeed" for word in launcher) and "--no_local_rank" not in launcher:
        return [f"--local_rank={local_rank}"]
    if "torch.distributed.launch" in launcher and not {"--use-env", "--use_env"} & set(launcher):
        return [f"--local-rank={local_rank}"]
    return []


def rank_variables(rank: int, cluster: Cluster) -> dict[str, str]:
    """What torchrun would tell this rank, and that it is alone.  Raises UsageError."""
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
    """The script and its arguments, as the launcher would hand them to Python.  Raises UsageError."""
    for place, word in enumerate(command):
        if word.endswith(".py"):
            return command[place:]
        if word == "-m" and place + 1 < len(command) and command[place + 1] not in _MODULES:
            return command[place:]
    raise UsageError(f"No script (a .py file or -m module) is found in {' '.join(command)!r}; --rank needs one.")


def is_launched(command: list[str]) -> bool:
    """Whether a launcher starts the script: torchrun, accelerate launch, deepspeed, or torch's module."""
    names = ("torchrun", "accelerate", "accelerate-launch", "deepspeed")
    for word in command:
        if Path(word).name in names or word in _MODULES:
            return True
        if word.endswith(".py"):
            return False
    return False


def flag_that_shuts_out(command: list[str]) -> str | None:
    """The flag with which the command's Python reads neither PYTHONPATH nor sitecustomize: -I, -E or -S."""
    words = iter(command)
    if not any(Path(word).name.startswith("python") for word in words):
        return None
    for word in words:
        if not word.startswith("-") or word[1:2] in ("m", "c", ""):
            return None
        if word[1:2] in ("X", "W"):
            if len(word) == 2:
                next(words, None)
        elif not word.startswith("--") and (found := next((each for each in "IES" if each in word), None)):
            return f"-{found}"
    return None


def program(command: list[str]) -> str:
    """The name of what the command runs: its script or module, without the path."""
    try:
        words = without_launcher(command)
    except UsageError:
        words = command
    return Path(words[1] if words[0] == "-m" else words[0]).name


def is_accelerated(command: Sequence[str]) -> bool:
    """Whether `accelerate launch` starts the script."""
    return _of_accelerate(list(command)) is not None


def told(command: Sequence[str], flag: str, value: str) -> list[str]:
    """The command of an `accelerate launch` that is given a flag of its own in place of what it says of that."""
    words = list(command)
    own = _of_accelerate(words)
    assert own is not None
    begin = len(words) - len(own)
    end = len(words) - len(without_launcher(own))
    kept, rest = words[:begin], iter(words[begin:end])
    for word in rest:
        name, equals, _ = word.partition("=")
        if name.replace("-", "_") != flag.replace("-", "_"):
            kept.append(word)
        elif not equals:
            next(rest, None)
    return [*kept, flag, value, *words[end:]]


def _of_accelerate(command: list[str]) -> list[str] | None:
    """The arguments of `accelerate launch` in a command line; None if it is another command."""
    for place, word in enumerate(command):
        if Path(word).name == "accelerate" and command[place + 1 : place + 2] == ["launch"]:
            return command[place + 2 :]
        if word == "accelerate.commands.launch" or Path(word).name == "accelerate-launch":
            return command[place + 1 :]
        if word.endswith(".py"):
            return None
    return None
