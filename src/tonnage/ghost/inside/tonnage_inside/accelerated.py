"""Prints the command and variables that `accelerate launch` would start, as one line of JSON; nothing is started.

    python -m tonnage_inside.accelerated ARGUMENTS OF ACCELERATE LAUNCH

Its options and configuration file reach the script as variables (FSDP, DeepSpeed, mixed precision), so a rank that is
run without the launcher needs them.  Accelerate's own code reads them; only the last call, which would start the
processes, is replaced.
"""

import json
import os
import sys
from typing import Any


class _Start(Exception):
    """Carries the command that would have been started, and its variables."""

    def __init__(self, command: list[str]) -> None:
        super().__init__()
        self.command = command
        self.variables = dict(os.environ)


def _elastic(arguments: Any) -> None:
    module = ["-m"] if arguments.module else []
    raise _Start([*module, arguments.training_script, *arguments.training_script_args])


def _subprocess(command: list[str], env: dict[str, str]) -> None:
    start = _Start(command[1:])  # the first word is the interpreter
    start.variables = env
    raise start


def main() -> None:
    import torch.distributed.run
    from accelerate.commands import launch

    torch.distributed.run.run = _elastic
    launch.subprocess.Popen = _subprocess
    before = dict(os.environ)
    try:
        launch.launch_command(launch.launch_command_parser().parse_args(sys.argv[1:]))
    except _Start as start:
        changed = {name: value for name, value in start.variables.items() if before.get(name) != value}
        print(json.dumps({"command": start.command, "variables": changed}))


if __name__ == "__main__":
    main()
