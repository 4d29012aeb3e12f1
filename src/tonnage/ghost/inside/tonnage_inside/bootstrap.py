"""Sets up the watch in a process of a dry-run.

Environment: TONNAGE_OUT (folder for the traces), TONNAGE_STEPS (optimizer steps to run),
TONNAGE_SOURCE, TONNAGE_ALONE (this process stands for its rank alone, see `ranks`).
"""

import atexit
import os
import sys
from types import ModuleType
from typing import Any, NoReturn

from . import native, outcome, ranks, values, written
from .imports import after_import
from .watch import Watch


def install() -> None:
    """Wait for torch; a process that never imports it is left alone."""
    after_import("torch", _torch_is_here)


def _torch_is_here(torch: ModuleType) -> None:
    folder = os.environ["TONNAGE_OUT"]
    steps = int(os.environ.get("TONNAGE_STEPS", "3"))
    ghost = native.load()
    watch = Watch(torch, ghost, stop_after_steps=steps)
    policy = values.Policy(torch, ghost)
    if ghost is not None:
        policy.install()
        ranks.prepare(torch, ghost)
        ghost.log(True)
    ended: dict[str, Any] = {}
    own_process = os.getpid()

    def write_once() -> None:
        if os.getpid() != own_process or ended.get("written") or not torch.cuda.is_initialized():
            return  # forked children (data loaders) and processes that never touched the GPU have nothing to say
        ended["written"] = True
        result = {name: value for name, value in ended.items() if name != "written"}
        path = os.path.join(folder, f"{own_process}.trace")
        written.write(path, watch, result, policy.assumed(), os.environ.get("TONNAGE_SOURCE", "ghost"))

    leave = os._exit

    def stop() -> None:
        if os.getpid() != own_process:
            return
        write_once()
        sys.stdout.flush()
        sys.stderr.flush()
        leave(0)

    def leave_at_once(status: int) -> NoReturn:
        write_once()
        leave(status)

    watch.on_stop = stop
    watch.start()
    outcome.hear_uncaught(watch, ended)
    atexit.register(write_once)
    os._exit = leave_at_once
