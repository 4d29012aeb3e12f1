"""Sets up the watch in a process of a dry-run.

Environment: TONNAGE_OUT (folder for the traces), TONNAGE_STEPS (optimizer steps to run),
TONNAGE_SOURCE, TONNAGE_ALONE (this process stands for its rank alone, see `ranks`),
TONNAGE_SETTINGS (see `script`).
"""

import atexit
import os
from types import ModuleType

from . import native, outcome, ranks, untouched, values
from .imports import after_import
from .recording import Recording
from .script import Script
from .watch import Watch


def install() -> None:
    """Wait for torch; a process that never imports it is left alone."""
    script = Script()
    script.listen()
    after_import("torch", lambda torch: _torch_is_here(torch, script))


def _torch_is_here(torch: ModuleType, script: Script) -> None:
    from torch.optim import optimizer

    ghost = native.load()
    watch = Watch(torch, ghost, stop_after_steps=int(os.environ.get("TONNAGE_STEPS", "3")))
    policy = values.Policy(torch, ghost)
    if ghost is not None:
        policy.install()
        ghost.log(True)
    ranks.prepare(torch, ghost)
    source = os.environ.get("TONNAGE_SOURCE", "ghost")
    recording = Recording(watch, os.environ["TONNAGE_OUT"], source, policy.assumed)
    watch.on_stop = recording.stop
    watch.script = script
    watch.start()
    torch.cuda._lazy_call(lambda: untouched.keep(torch))
    torch.cuda._lazy_call(recording.begin)
    optimizer.register_optimizer_step_post_hook(recording.note)
    outcome.hear_uncaught(watch, recording.ended)
    outcome.hear_spawned(torch, watch, recording.ended)
    atexit.register(recording.at_exit)
    os._exit = recording.leave_at_once
