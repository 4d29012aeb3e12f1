"""`tonnage dry-run`: the user's own command, unchanged, for a few optimizer steps on ghost GPUs."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tonnage.catalog.overheads import ghost_settings
from tonnage.cluster import CPU, Cluster
from tonnage.errors import TrialFailed, UsageError
from tonnage.estimates.ddp_buckets import with_buckets_of_script
from tonnage.estimates.estimate import Estimate
from tonnage.estimates.step_time import played, saying
from tonnage.estimates.summary import Run, summarise
from tonnage.ghost import cards, running
from tonnage.ghost.process import NO_CACHING, any_libraries, environment, interpreter, programs
from tonnage.ghost.scratch import scratch
from tonnage.ghost.wheel import Torch, find
from tonnage.script import launchers, trackers
from tonnage.trace import operations as worked
from tonnage.trace import trace as traces
from tonnage.trace.trace import Trace
from tonnage.units import counted, size

Progress = Callable[[str], None]

ENOUGH_STEPS: Final = 2
"""Optimizer states appear in the first step, so the second is the first that has everything."""

WRITING_SECONDS: Final = 120.0
"""How long processes that are stopped may take to write their traces."""

LATER_SECONDS: Final = 10.0
"""How long ranks may go on when the process that started them has ended well: some launchers do not wait."""


_CARDS: Final = "cards"
"""The name of the account of the cards in a run's folder."""

_OF_VALUES: Final = ("RuntimeError", "IndexError", "ValueError", "AssertionError", "KeyError", "ZeroDivisionError")
"""Errors that a number can lead to which was not computed."""

_SIZED: Final = ("unique of computed values", "nonzero() (also boolean indexing")
"""How assumptions begin about the size of a result (`ASSUMED` of `tonnage_inside.values.policy`)."""

_SECOND: Final = (
    "These figures are of a second run, in which what is computed from small values that are known is computed on "
    "the host."
)

_UNDEFINED: Final = re.compile(r"undefined symbol: ((?:cu|nccl|nvml|nvrtc|nvtx)\w+)")
"""What the loader says of a library that wants a function of NVIDIA's which is not there."""

_LOADER_EXIT: Final = 127
"""The exit code of a process that calls a function for the first time, of which the loader finds nothing."""

_LOADER_EXIT_OF_RANK: Final = re.compile(rf"(exitcode\s*:|exit status) {_LOADER_EXIT}\b")
"""The same in the words of torchrun and accelerate launch."""

_OF_LAUNCHERS: Final = ("ChildFailedError", "CalledProcessError", "ProcessExitedException")
"""Errors which say only that another process has failed."""

_NOT_FOLLOWED: Final = "A dry-run follows PyTorch's caching allocator and knows of no other; try without it."

_OTHER_ALLOCATOR: Final = re.compile(r"(\w+) does not yet support recordHistory")
"""What an allocator in its place says when it is to be followed."""

_MOST_NAMES: Final = 4
"""Of packages that are not installed, in one line."""

_LIBRARIES: Final = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ", "/torch/")
"""What is in the paths of frames that are not the program's own."""


@dataclass(frozen=True, kw_only=True)
class Left:
    """What the command's processes left behind."""

    traces: tuple[Trace, ...]
    """One for each rank, in order."""
    beside: tuple[Trace, ...]
    """Of further processes with the rank of one of those: a program may start others that use the GPU."""
    cut_off: tuple[dict[str, Any], ...]
    """How far the processes came that left no trace: rank, name, steps, peaks, host_bytes."""
    named: Mapping[int, tuple[int, str]]
    """Rank and name of each process that used the GPU, by its number."""
    failed: tuple[dict[str, Any], ...] = ()
    """What Pythons failed with, the first of them first: message, error, stack, cuda."""
    reached: bool = True
    """Whether a Python of the command found the ghost at all."""
    missing: tuple[str, ...] = ()
    """Packages that the program's own code asked for and that are not installed."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The command, run to its end."""

    command: list[str]
    """As it was run: of one rank alone without its launcher."""
    ended: int | None
    """Its exit code; None if it had to be stopped."""
    left: Left
    """What its processes left behind."""
    cards: tuple[cards.Card, ...]
    """What they held of each card."""


def run(
    command: list[str],
    cluster: Cluster,
    *,
    steps: int = 3,
    timeout_seconds: float = 900.0,
    rank: int | None = None,
    torch_version: str | None = None,
    variables: Mapping[str, str] | None = None,
    seconds: bool = True,
    progress: Progress = lambda text: None,
) -> Run:
    """Run `command` on ghost cards until `steps` optimizer steps are done, and sum up what each rank did.

    `rank` runs only this rank of the cluster's, in one process and without the command's launcher (torchrun,
    accelerate launch, deepspeed), which is how hundreds of ranks are tried on a laptop.
    With `seconds` one step more is made when these are, and its operations are counted (`costs.played`).
    A command that is stopped at the time limit is summed up when every rank made two steps.  One that fails in its
    first step, maybe for a value that no ghost computes, is run once more with what can be computed on the host.
    The command's output goes to standard error.  Raises TrialFailed when it fails for a reason other than memory,
    hangs, or never uses the GPU; GhostUnavailable when no ghost can run here; UsageError for an empty command.
    """
    if not command:
        raise UsageError("No command to run; write it after two dashes: tonnage dry-run --gpu t4 -- python train.py")
    if steps < 1:
        raise UsageError(f"{steps} steps cannot be run; at least 1.")
    if flag := launchers.find_isolating_flag(command):
        raise UsageError(
            f"Python started with {flag} ignores the environment or the site by which the ghost is reached; "
            f"leave {flag} out."
        )
    if cluster.device.id == CPU:
        raise UsageError("A dry-run is of a script that uses GPUs, and cpu is none; name a card with --gpu.")
    given = os.environ if variables is None else variables
    if NO_CACHING in given:
        raise UsageError(f"{NO_CACHING} is set. {_NOT_FOLLOWED}")
    any_libraries()
    python = interpreter(command)
    torch = find(python, torch_version, progress)

    def attempt(inherit: Mapping[str, str] | None) -> Attempt:
        with scratch("tonnage-") as folder:
            prepared = _prepared(torch, cluster, steps, inherit, folder)
            prepared |= {"TONNAGE_COUNTED": "1"} if seconds else {}
            asked = command
            if rank is not None:
                asked, said = launchers.make_rank_command(command, python, rank, cluster, prepared)
                prepared |= said
            progress(f"running {shlex.join(asked)} on {cluster.gpus_per_node} ghost {cluster.device.id}")
            ended = _run(asked, prepared, timeout_seconds, folder)
            return Attempt(command=asked, ended=ended, left=_left(folder), cards=cards.read(folder / _CARDS))

    made, notes = attempt(variables), []
    if _is_unbound(made):
        progress("once more, to hear which library wants a function that is not there")
        if unbound := _unbound(attempt({**given, "LD_BIND_NOW": "1"}).left):
            raise TrialFailed(unbound)
    failed = _failed_early(made.left)
    if failed is not None or _guessed(made.left):
        progress("once more, following what the program computes from small values that are known")
        again = attempt({**given, "TONNAGE_FOLLOW": "1"})
        went_on = again.left.traces and not any(trace.outcome.get("kind") == "failed" for trace in again.left.traces)
        if went_on and (failed is not None or not _guessed(again.left) or _differs(again.left, made.left)):
            made, notes = again, [_note_followed(failed)]
    notes += _judged(made.command, made.left, made.ended, steps, timeout_seconds)
    notes += [_note_shared(card, made.left.named, cluster) for card in made.cards if len(card.holders) > 1]
    summed = summarise(
        made.left.traces,
        cluster,
        model={"name": launchers.program(made.command)},
        job={"command": made.command, "steps": steps},
        plan={},
        notes=notes,
    )
    told = tuple(_told(card, made.left.named) for card in made.cards)
    estimate = with_buckets_of_script(summed.estimate)
    if seconds:
        estimate = _with_time(estimate, made.left.traces, cluster)
    return replace(summed, estimate=replace(estimate, cards=told))


def _with_time(estimate: Estimate, ranks: Sequence[Trace], cluster: Cluster) -> Estimate:
    """The estimate with a step's seconds, or with why they are not known."""
    seen = [trace.worked for trace in ranks if trace.worked is not None]
    if seen:
        return played(estimate, seen, cluster)
    why = "the command ended without a further one, or it could not be counted to its end"
    if any(trace.script.get("compiled") for trace in ranks):
        why = "what torch.compile made is not seen"
    return saying(estimate, f"time: unknown. The operations of a step are counted in one more; {why}.")


def _prepared(
    torch: Torch, cluster: Cluster, steps: int, inherit: Mapping[str, str] | None, folder: Path
) -> dict[str, str]:
    """The environment of the command, and what it needs in the folder."""
    cards.create(folder / _CARDS)
    settings = {key.removeprefix("GHOST_").lower(): value for key, value in ghost_settings(cluster).items()}
    prepared = environment(
        torch=torch,
        inherit=inherit,
        watch_into=folder,
        steps=steps,
        devices=cluster.gpus_per_node,
        cards=str(folder / _CARDS),
        **settings,
    )
    prepared["PATH"] = os.pathsep.join([str(programs(folder)), prepared.get("PATH", os.defpath)])
    return prepared | trackers.offline(folder, prepared)


def _is_unbound(made: Attempt) -> bool:
    """Whether the loader ended a process, which it does when a function that is called first is not there."""
    said = (str(failed["message"]) for failed in made.left.failed)  # torchrun's, of the processes that it started
    ended = made.ended == _LOADER_EXIT or any(_LOADER_EXIT_OF_RANK.search(message) for message in said)
    return ended and made.left.reached and not made.left.traces


def _unbound(left: Left) -> str | None:
    """Which library wanted what, where all its functions were looked for when it was loaded."""
    outcomes = [*left.failed, *map(_outcome, left.traces)]
    found = next((each for each in outcomes if "undefined symbol" in str(each.get("message"))), None)
    return None if found is None else _described(found)


def _failed_early(left: Left) -> Trace | None:
    """A rank that failed within its first step, and had read a number that the card would have computed."""
    failed = [trace for trace in left.traces if trace.outcome.get("error") in _OF_VALUES and not trace.steps]
    ran_out = any(trace.outcome.get("kind") == "oom" for trace in left.traces)
    found = next((trace for trace in failed if trace.outcome.get("computed_reads")), None)
    return None if ran_out else found


def _guessed(left: Left) -> bool:
    """Whether the size of some result was guessed, which hangs on values that the program computes."""
    return any(text.startswith(_SIZED) for trace in left.traces for text in trace.assumed)


def _differs(left: Left, other: Left) -> bool:
    """Whether some rank held something else, though not everything that a size hangs on is known."""
    here, there = ({trace.rank: trace.peaks for trace in one.traces} for one in (left, other))
    return here != there


def _note_followed(failed: Trace | None) -> str:
    if failed is None:
        return f"How large some results are hangs on values that the program computes. {_SECOND}"
    error, message = failed.outcome.get("error"), _shortened(str(failed.outcome.get("message")), 160)
    where = _place(failed.outcome.get("stack") or [""])
    return f"Where all that is computed reads as zero it fails ({error}: {message}, at {where}). {_SECOND}"


def _told(card: cards.Card, named: Mapping[int, tuple[int, str]]) -> dict[str, Any]:
    """A card as the report's JSON has it; a process that did not use torch has neither rank nor name."""
    holders = []
    for holder in card.holders:
        rank, name = named.get(holder.process, (None, None))
        told = {"process": holder.process, "rank": rank, "name": name}
        holders.append({**told, "held_bytes": holder.held_bytes, "peak_bytes": holder.peak_bytes})
    return {"index": card.index, "peak_bytes": card.peak_bytes, "processes": holders}


def _note_shared(card: cards.Card, named: Mapping[int, tuple[int, str]], cluster: Cluster) -> str:
    """A card that several processes used: what each had, and what they held together."""
    most = [
        f"{_called(holder.process, named)} {size(holder.peak_bytes)}"
        for holder in sorted(card.holders, key=lambda holder: -holder.peak_bytes)
    ]
    more = f" and {len(most) - 8} more" if len(most) > 8 else ""
    apart = sum(holder.peak_bytes for holder in card.holders)
    summed = f"; had all peaks come at once, {size(apart)}" if apart > card.peak_bytes else ""
    return (
        f"GPU {card.index} was used by {len(most)} processes, with contexts and NCCL's buffers "
        f"{', '.join(most[:8])}{more} at most: together they held at most {size(card.peak_bytes)} of "
        f"{size(cluster.device.capacity_bytes)}{summed}."
    )


def _called(process: int, named: Mapping[int, tuple[int, str]]) -> str:
    if process not in named:
        return f"process {process}"
    rank, name = named[process]
    return f"{name} (rank {rank})" if rank else name


def _judged(command: list[str], left: Left, ended: int | None, steps: int, timeout_seconds: float) -> list[str]:
    """What a reader of the answer should know of how the command ended.  Raises TrialFailed if there is none."""
    if not left.traces:
        raise TrialFailed(_why_nothing(command, left, ended, timeout_seconds))
    notes = [_note_beside(trace) for trace in left.beside if trace.peaks.get("reserved_bytes")]
    if any(trace.outcome.get("kind") == "oom" for trace in left.traces):
        return notes
    for trace in left.traces:
        if trace.outcome.get("kind") == "failed":
            raise TrialFailed(_why_failed(trace))
    done = min(trace.steps for trace in left.traces)
    if ended is None:
        latest = min(left.traces, key=lambda trace: trace.steps)
        where = _where_stopped(latest, timeout_seconds, steps)
        if done < ENOUGH_STEPS:
            raise TrialFailed(f"{where} Give it more time with --timeout, or fewer steps with --steps.")
        return [*notes, where]
    lost = [_how_far(left.cut_off)] if left.cut_off else []
    if ended > 0:
        ooms = max(trace.peaks.get("ooms", 0) for trace in left.traces)
        why = [f"The command ended with exit code {ended} after {counted(done, 'optimizer step')}.", *lost]
        raise TrialFailed(" ".join([*why, _had_run_out(ooms)] if ooms else why))
    if not any(trace.peaks.get("allocated_bytes", 0) for trace in (*left.traces, *left.beside)):
        raise TrialFailed(_on_the_host(command, "asked PyTorch for no memory of a GPU"))
    notes += lost
    if 0 < done < min(steps, ENOUGH_STEPS):
        notes.append(_note_early(done))
    if ended < 0:
        notes.append(f"The process was ended by signal {-ended} on its way out, after everything had been recorded.")
    return notes


def _note_early(done: int) -> str:
    return (
        f"The command ended by itself after {counted(done, 'optimizer step')}, perhaps since losses read as zero: "
        "what a later step needs, with the optimizer's states beside its activations, is not in these numbers."
    )


def _why_failed(trace: Trace) -> str:
    outcome = trace.outcome
    message = _shortened(str(outcome.get("message")))
    told = _described(_outcome(trace))
    if ooms := trace.peaks.get("ooms", 0):
        return f"{told} {_had_run_out(ooms)}"
    if "invalid device ordinal" in message:
        count = trace.device.get("devices", 1)
        return f"{told} The machine has {counted(count, 'GPU')}; say how many with --gpu, such as 8xt4."
    if outcome.get("error") not in _OF_VALUES or not outcome.get("computed_reads"):
        return told
    return f"{told} If it needs a value that only a real GPU computes, skip that part in the dry-run."


def _outcome(trace: Trace) -> dict[str, Any]:
    return {**trace.outcome, "cuda": trace.versions.get("cuda")}


def _described(outcome: Mapping[str, Any]) -> str:
    """What a program failed with, and where; of a library that does not find a function, what that means."""
    message = _shortened(str(outcome.get("message")))
    if other := _OTHER_ALLOCATOR.search(message):
        return f"The command allocates by {other[1]}. {_NOT_FOLLOWED}"
    stack = outcome.get("stack")
    where = f" (at {_place(stack)})" if stack else ""
    kind = outcome.get("error")
    told = f"The command failed: {message if message == kind else f'{kind}: {message}'}{where}."
    if "No CUDA GPUs are available" in message:
        return (
            f"{told} The machine has those of --gpu, from 0 on: does CUDA_VISIBLE_DEVICES in the script name others?"
        )
    symbol, cuda = _UNDEFINED.search(message), outcome.get("cuda")
    if symbol is None:
        return told
    return (
        f"{told} The ghost has the public functions of CUDA 12 and 13, and no {symbol[1]}: was this library built "
        f"for another CUDA than torch's{f', which is {cuda}' if cuda else ''}?"
    )


def _had_run_out(ooms: int) -> str:
    """Of a command that caught what PyTorch raised, and gave up in its own words."""
    return f"It had run out of GPU memory {counted(ooms, 'time')} before."


def _place(stack: Sequence[str]) -> str:
    """The last frame, and the last one of the program's own if that is another."""
    own = [frame for frame in stack if not any(part in frame for part in _LIBRARIES)]
    return stack[-1] if not own or own[-1] == stack[-1] else f"{own[-1]}, in {stack[-1]}"


def _where_stopped(trace: Trace, timeout_seconds: float, steps: int) -> str:
    """How far a command came that was stopped at the time limit."""
    outcome = trace.outcome
    done = f"{trace.steps} of {counted(steps, 'optimizer step')} {'was' if steps == 1 else 'were'} done"
    told = f"The command was stopped after {timeout_seconds:.0f} s, when {done} and at most "
    told += f"{size(trace.peaks.get('allocated_bytes', 0))} had been allocated"
    if outcome.get("kind") != "stopped":
        return f"{told}."
    module = f" in {outcome['module']}" if outcome.get("module") else ""
    stack = outcome.get("stack") or ()
    where = f" (at {_place(stack)})" if stack else ""
    return f"{told}; it was in step {outcome['step']}, {outcome['phase']}{module}{where}."


def _note_beside(trace: Trace) -> str:
    """A process that used a card of which another process is reported."""
    ending = " and ran out of memory" if trace.outcome.get("kind") == "oom" else ""
    return (
        f"Another process of the command used GPU {trace.device.get('card', 0)} too{ending}: at most "
        f"{size(trace.peaks.get('allocated_bytes', 0))} allocated, {size(trace.peaks.get('reserved_bytes', 0))} "
        "reserved, and a context of its own."
    )


def _how_far(cut_off: Sequence[dict[str, Any]]) -> str:
    """One sentence about processes that were killed."""
    told = [_reached(process) for process in cut_off[:4]]
    more = f", and {len(cut_off) - 4} more" if len(cut_off) > 4 else ""
    return f"Cut off without a trace: {'; '.join(told)}{more}."


def _reached(process: dict[str, Any]) -> str:
    rank, steps = process["rank"], process["steps"]
    if not steps:
        return f"rank {rank} before its first optimizer step"
    return (
        f"rank {rank} after {counted(steps, 'optimizer step')}, up to the last of which at most "
        f"{size(process['peaks']['reserved_bytes'])} were reserved on the GPU and {size(process['host_bytes'])} "
        "resident on the host"
    )


def _shortened(message: str, most: int = 400) -> str:
    """A message without the C++ frames that torch appends, and not longer than a paragraph."""
    message = message.split(" Exception raised from ")[0]
    return message if len(message) <= most else f"{message[:most]} ..."


def _run(command: list[str], variables: dict[str, str], timeout_seconds: float, folder: Path) -> int | None:
    """The command's exit code; None if it had to be stopped.  All that it started ends with it, and with us."""
    with _asking(folder) as ask, running.held_open(folder / "alive"):
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,
            preexec_fn=running.ends_with(os.getpid()),
        )
        try:
            ended = _waited(process, timeout_seconds)
            if ended == 0:
                _wait_for_traces(folder, LATER_SECONDS)
            ask()
            _wait_for_traces(folder, WRITING_SECONDS)
            return ended
        finally:
            running.end(process, variables["GHOST_SHM"])


def _waited(process: "subprocess.Popen[bytes]", timeout_seconds: float) -> int | None:
    try:
        return process.wait(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        return None


@contextlib.contextmanager
def _asking(folder: Path) -> Iterator[Callable[[], None]]:
    """A pipe of which all processes hear when the function is called: its writing end is closed (`recording`)."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(running.held_open(folder / "stop"))
        yield stack.close


def _wait_for_traces(folder: Path, most_seconds: float) -> None:
    """Until every living process that used the GPU has written its trace."""
    deadline = time.monotonic() + most_seconds
    while time.monotonic() < deadline:
        if all(path.with_suffix(".trace").exists() or not _lives(path.stem) for path in folder.glob("*.progress")):
            return
        time.sleep(0.05)


def _lives(process: str) -> bool:
    """Whether it is there, and not only its exit code, for which nobody asks."""
    try:
        return Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ends while it is read
        return False


def _left(folder: Path) -> Left:
    """What is in the folder; of several processes with one rank the one that ran out of memory, or came farthest."""
    found = {path.stem: _counted(path) for path in sorted(folder.glob("*.trace"))}
    by_rank: dict[int, list[Trace]] = {}
    for trace in sorted(found.values(), key=_importance):
        by_rank.setdefault(trace.rank, []).append(trace)
    begun = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.progress"))}
    cut_off = [told for process, told in begun.items() if process not in found]
    return Left(
        traces=tuple(by_rank[rank][-1] for rank in sorted(by_rank)),
        beside=tuple(trace for rank in sorted(by_rank) for trace in by_rank[rank][:-1]),
        cut_off=tuple(sorted(cut_off, key=lambda process: int(process["rank"]))),
        named={int(process): (int(told["rank"]), str(told["name"])) for process, told in begun.items()},
        failed=tuple(json.loads(path.read_text()) for path in _by_age(folder.glob("*.failed"))),
        reached=(folder / "reached").exists(),
        missing=tuple(
            name for path in _by_age(folder.glob("*.missing")) for name in json.loads(path.read_text())["names"]
        ),
    )


def _counted(path: Path) -> Trace:
    """A process's trace, with what the operations of a further step work, where that was counted."""
    return replace(traces.load(path), worked=worked.load(path.with_suffix(".worked")))


def _by_age(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: path.stat().st_mtime_ns)


def _importance(trace: Trace) -> tuple[bool, int, int]:
    return trace.outcome.get("kind") == "oom", trace.steps, trace.event_count


_NOT_REACHED: Final = (
    "No Python that it started found the ghost: none was started, or without the environment that it was given "
    "(env -i, sudo, a container), or told to pass over it (python -I, -E or -S)."
)


def _why_nothing(command: list[str], left: Left, ended: int | None, timeout_seconds: float) -> str:
    far = f" {_how_far(left.cut_off)}" if left.cut_off else ""
    if ended is None:
        where = far or " It had not used the GPU until then."
        return (
            f"The command was stopped after {timeout_seconds:.0f} s.{where} "
            "Give it more time with --timeout, or fewer steps with --steps."
        )
    if ended < 0:
        name = _signal(-ended)
        why = " A host that has no memory left ends processes like this." if name == "SIGKILL" else ""
        return f"The command was ended by {name}; its own message is above.{far}{why}"
    failed = [each for each in left.failed if each["error"] not in _OF_LAUNCHERS]
    if ended != 0 and failed:
        return f"{_described(failed[0])}{far}"
    own = " Its own message is above." if ended != 0 or far else ""
    if not left.reached:
        return f"The command ended with exit code {ended}. {_NOT_REACHED}{own}"
    if own:
        when = f".{far}" if far else " before it used the GPU."
        return f"The command ended with exit code {ended}{when}{own}{_lacking(left.missing)}"
    if left.missing:
        return f"The command {shlex.join(command)!r} ended without using a GPU.{_lacking(left.missing)}"
    return _on_the_host(command, "ended without using a GPU")


def _lacking(names: Sequence[str]) -> str:
    """What a program asked for in vain; it may have caught the error, or do without."""
    if not names:
        return ""
    told = ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
    return f" It asked for {told}, which {'is' if len(names) == 1 else 'are'} not installed here."


def _signal(number: int) -> str:
    """Its name, which real-time signals have not."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _on_the_host(command: list[str], what: str) -> str:
    return (
        f"The command {shlex.join(command)!r} {what}. Does it train, and does it choose the GPU "
        "when torch.cuda.is_available() is true?"
    )
