"""`tonnage dry-run`: the user's own command, unchanged, for a few optimizer steps on ghost GPUs."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tonnage import trace as traces
from tonnage.device import Cluster
from tonnage.errors import TrialFailed, UsageError
from tonnage.ghost.process import environment, interpreter
from tonnage.ghost.wheel import find
from tonnage.summary import Run, summarise
from tonnage.trace import Trace

Progress = Callable[[str], None]

_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")


def run(
    command: list[str],
    cluster: Cluster,
    *,
    steps: int = 3,
    timeout_seconds: float = 900.0,
    rank: int | None = None,
    torch_version: str | None = None,
    variables: Mapping[str, str] | None = None,
    progress: Progress = lambda text: None,
) -> Run:
    """Run `command` on ghost cards until `steps` optimizer steps are done, and sum up what each rank did.

    `rank` runs only this rank of the cluster's, in one process and without the command's launcher (torchrun,
    accelerate launch, deepspeed), which is how hundreds of ranks are tried on a laptop.
    The command's output goes to standard error.  Raises TrialFailed when it fails for a reason other than memory,
    hangs, or never uses the GPU; GhostUnavailable when no ghost can run here; UsageError for an empty command.
    """
    if not command:
        raise UsageError("No command to run; write it after two dashes: tonnage dry-run --gpu t4 -- python train.py")
    if steps < 1:
        raise UsageError(f"{steps} steps cannot be run; at least 1.")
    inherited = dict(os.environ if variables is None else variables)
    python = interpreter(command)
    torch = find(python, torch_version, progress)
    if rank is not None:
        command = [python, *_without_launcher(command)]
        inherited |= _alone(rank, cluster)
    with tempfile.TemporaryDirectory(prefix="tonnage-") as folder:
        settings = {
            key.removeprefix("GHOST_").lower(): value for key, value in cluster.device.ghost_settings().items()
        }
        variables = environment(
            torch=torch,
            inherit=inherited,
            watch_into=Path(folder),
            steps=steps,
            devices=cluster.gpus_per_node,
            **settings,
        )
        progress(f"running {' '.join(command)} on {cluster.gpus_per_node} ghost {cluster.device.id}")
        ended = _run(command, variables, timeout_seconds)
        found = _traces(Path(folder))
    if not found:
        raise TrialFailed(_why_nothing(command, ended))
    failures = [trace for trace in found if trace.outcome.get("kind") == "failed"]
    if failures:
        worst = failures[0].outcome
        where = worst.get("stack") or [""]
        raise TrialFailed(
            f"The command failed: {worst.get('error')}: {_shortened(str(worst.get('message')))} (at {where[-1]}). "
            "If it needs a value that only a real GPU computes, skip that part in the dry-run."
        )
    if ended is None:
        raise TrialFailed(
            f"The command did not finish {steps} optimizer steps within {timeout_seconds:.0f} s and was stopped; "
            "give it more time with --timeout, or fewer steps with --steps."
        )
    ran_out = any(trace.outcome.get("kind") == "oom" for trace in found)
    if ended > 0 and not ran_out:
        raise TrialFailed(f"The command ended with exit code {ended} after {found[0].steps} optimizer steps.")
    notes = []
    if ended < 0 and not ran_out:
        # Traces are written last; threads that still want the interpreter then can end a process by SIGABRT.
        notes.append(f"The process was ended by signal {-ended} on its way out, after everything had been recorded.")
    return summarise(
        found,
        cluster,
        model={"name": _program(command)},
        job={"command": command, "steps": steps},
        plan={},
        notes=notes,
    )


def _shortened(message: str, most: int = 400) -> str:
    """A message without the C++ frames that torch appends, and not longer than a paragraph."""
    message = message.split(" Exception raised from ")[0]
    return message if len(message) <= most else f"{message[:most]} ..."


def _program(command: list[str]) -> str:
    """The name of what the command runs: its script or module, without the path."""
    try:
        words = _without_launcher(command)
    except UsageError:
        words = command
    return Path(words[1] if words[0] == "-m" else words[0]).name


def _without_launcher(command: list[str]) -> list[str]:
    """The script and its arguments, as the launcher would hand them to Python.  Raises UsageError."""
    for place, word in enumerate(command):
        if word.endswith(".py"):
            return command[place:]
        if word == "-m" and place + 1 < len(command) and command[place + 1] not in _LAUNCHER_MODULES:
            return command[place:]
    raise UsageError(f"No script (a .py file or -m module) is found in {' '.join(command)!r}; --rank needs one.")


def _alone(rank: int, cluster: Cluster) -> dict[str, str]:
    """What torchrun would tell this rank, and that it is alone."""
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


def _run(command: list[str], variables: dict[str, str], timeout_seconds: float) -> int | None:
    """The command's exit code; None if it had to be stopped.  Its whole process group ends with it."""
    process = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)
    deadline = time.monotonic() + timeout_seconds
    try:
        return process.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end_group(process)


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signal_number)
        except ProcessLookupError:
            break
        if process.poll() is None:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                continue
    process.wait()


def _traces(folder: Path) -> list[Trace]:
    """The traces that the command's processes wrote, by rank; of several with one rank the longest."""
    by_rank: dict[int, Trace] = {}
    for path in sorted(folder.glob("*.trace")):
        trace = traces.load(path)
        known = by_rank.get(trace.rank)
        if known is None or trace.event_count > known.event_count:
            by_rank[trace.rank] = trace
    return [by_rank[rank] for rank in sorted(by_rank)]


def _why_nothing(command: list[str], ended: int | None) -> str:
    if ended is None:
        return (
            "The command was stopped at the time limit before its optimizer steps were done; "
            "give it more time with --timeout, or fewer steps with --steps."
        )
    if ended < 0:
        return f"The command was ended by {signal.Signals(-ended).name} and left nothing; its own message is above."
    if ended != 0:
        return f"The command ended with exit code {ended} before it used the GPU; its own message is above."
    return (
        f"The command {' '.join(command)!r} ended without using a GPU. Does it train, and does it choose the GPU "
        "when torch.cuda.is_available() is true?"
    )
