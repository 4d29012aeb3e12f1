"""How a dry-run command ended, in sentences: notes beside its answer, or the reason why it has none.

The command ended with exit code 1 after 2 optimizer steps. It had run out of GPU memory 1 time before.
"""

import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tonnage.catalog.models import find_model
from tonnage.cluster import Cluster
from tonnage.errors import CannotEstimate, TrialFailed
from tonnage.ghost import cards
from tonnage.script import further, launchers
from tonnage.script.process_results import ProcessResults
from tonnage.trace.trace import Trace
from tonnage.units import format_size, pluralise

ENOUGH_STEPS: Final = 2
"""Steps after which the peak is known: optimizer states appear in the first step, so the second has everything."""

_ONE_STEP: Final = (
    "Only the first step was run: a later one has the optimizer's states beside its activations and may need more. "
    "Run it with --steps 2 or more."
)

VALUE_ERRORS: Final = ("RuntimeError", "IndexError", "ValueError", "AssertionError", "KeyError", "ZeroDivisionError")
"""Errors that a value which was not computed can cause."""

_UNDEFINED: Final = re.compile(r"undefined symbol: ((?:cu|nccl|nvml|nvrtc|nvtx)\w+)")
"""The loader's error about a library that needs a function of NVIDIA which does not exist."""

_LAUNCHER_ERRORS: Final = ("ChildFailedError", "CalledProcessError", "ProcessExitedException")
"""Errors that say only that another process failed."""

ONE_ALLOCATOR: Final = "A dry-run follows PyTorch's caching allocator only; try without the other."

_OTHER_ALLOCATOR: Final = re.compile(r"(\w+) does not yet support recordHistory")
"""The error of another allocator when its history is to be recorded."""

_MOST_NAMES: Final = 4
"""Most packages that a message names."""

_LIBRARIES: Final = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ", "/torch/")
"""Parts of the paths of frames that are not in the program's own code."""

_NOT_ON_THE_HUB: Final = re.compile(r"huggingface|repository|cached (?:snapshot|files)|repo[ _]id|LocalEntryNotFound")
"""Words of the errors about a model that is neither on this machine nor, by its name, on the Hub."""

_NO_MACHINE_CODE: Final = re.compile(r"invalid device function|no kernel image is available")
"""CUDA's words about a kernel that a library was not built with for the capability of the card."""

_FORKED: Final = re.compile(r" \w*(Process|Worker)-\d")
"""Part of the name of a process that Python's multiprocessing has started."""

_NOT_REACHED: Final = (
    "No Python that it started found the ghost: it started none, or Python did not get its environment (env -i, "
    "sudo, a container), or was told to ignore it (python -I, -E or -S)."
)


def note_failed_again(failure: Exception) -> str:
    """Return the note about a second run, without a counted step, that has failed."""
    return (
        "The peak may be too high: it has a step whose operations were counted, which takes more memory, and the "
        f"command failed when it was run again without: {failure}"
    )


def note_shared(card: cards.Card, names: Mapping[int, tuple[int, str]], cluster: Cluster) -> str:
    """Return the note about a GPU that several processes used: the peak of each, and of all together."""
    peaks = [
        f"{_name_process(holder.process, names)} {format_size(holder.peak_bytes)}"
        for holder in sorted(card.holders, key=lambda holder: -holder.peak_bytes)
    ]
    more = f" and {len(peaks) - 8} more" if len(peaks) > 8 else ""
    sum_of_peaks = sum(holder.peak_bytes for holder in card.holders)
    summed = f"; had all peaks come at once, {format_size(sum_of_peaks)}" if sum_of_peaks > card.peak_bytes else ""
    return (
        f"GPU {card.index} was used by {len(peaks)} processes. Their peaks, with contexts and NCCL's buffers: "
        f"{', '.join(peaks[:8])}{more}; together they held at most {format_size(card.peak_bytes)} of "
        f"{format_size(cluster.device.capacity_bytes)}{summed}."
    )


def _name_process(process: int, names: Mapping[int, tuple[int, str]]) -> str:
    """Return the name of a process for a note, with its rank unless that is 0."""
    if process not in names:
        return f"process {process}"
    rank, name = names[process]
    return f"{name} (rank {rank})" if rank else name


def judge(
    command: list[str], results: ProcessResults, ended: int | None, steps: int | None, timeout_seconds: float
) -> list[str]:
    """Return the notes about how the command ended.

    Raises TrialFailed if the results give no answer; CannotEstimate if it has optimizers and none made a step.
    """
    if not results.traces:
        raise TrialFailed(_explain_no_trace(command, results, ended, timeout_seconds))
    notes = [_note_other_process(trace) for trace in results.others if trace.peaks.get("reserved_bytes")]
    largest = max(results.traces, key=lambda trace: trace.peaks.get("reserved_bytes", 0))
    notes += further.notes(largest, results.unwound, steps)
    if any(trace.outcome.get("kind") == "oom" for trace in results.traces):
        return notes
    for trace in results.traces:
        if trace.outcome.get("kind") == "failed":
            raise TrialFailed(explain_failure(trace))
    done = min(trace.steps for trace in results.traces)
    is_over = ended is not None and ended <= 0
    if is_over and not any(trace.peaks.get("allocated_bytes") for trace in (*results.traces, *results.others)):
        raise TrialFailed(_explain_no_gpu(command, "allocated no GPU memory through PyTorch"))
    if all(trace.script.get("complete") for trace in results.traces):
        one_step = [_ONE_STEP] if done == 1 else []
        return [*one_step, *notes, *_note_afterwards(results, ended)]
    if ended is None:
        latest = min(results.traces, key=lambda trace: trace.steps)
        where = _describe_stop(latest, timeout_seconds, steps)
        if done < ENOUGH_STEPS:
            raise TrialFailed(f"{where} {_suggest_time(command, results)}")
        return [*notes, where]
    lost = [describe_cut_off(results.cut_off)] if results.cut_off else []
    if ended > 0:
        ooms = max(trace.peaks.get("ooms", 0) for trace in results.traces)
        why = [f"The command ended with exit code {ended} after {pluralise(done, 'optimizer step')}.", *lost]
        raise TrialFailed(" ".join([*why, _note_ooms(ooms)] if ooms else why))
    if not any(trace.steps for trace in results.traces) and (idle := _count_idle_elements(results.traces)):
        raise CannotEstimate(_explain_no_step(idle, results.traces))
    notes += lost
    if 0 < done < min(steps or ENOUGH_STEPS, ENOUGH_STEPS):
        notes.append(_note_early(done, _find_branch(results.traces)))
    if ended < 0:
        notes.append(f"Signal {-ended} ended the process at its exit, after everything had been recorded.")
    return notes


def name_on_the_hub(command: list[str], failure: str) -> str:
    """Return how the Hub calls a model that the command names as the catalog does, where it was not found; or "".

    A program that asks the Hub gets no model of a name without an owner.
    """
    values = (word.rpartition("=")[2] for word in command)
    models = ((value, find_model(value)) for value in values if "/" not in value)
    known = next(((value, model) for value, model in models if model is not None), None)
    if known is None or _NOT_ON_THE_HUB.search(failure) is None:
        return ""
    return f" {known[0]} is a name of tonnage's catalog; the Hub's, which programs need, is {known[1].hub}."


def _note_afterwards(results: ProcessResults, ended: int | None) -> list[str]:
    """Return a note on what the command did after the steps, if it did not end well."""
    failed = [trace.script["afterwards"] for trace in results.traces if trace.script.get("afterwards")]
    lost = [describe_cut_off(results.cut_off)] if results.cut_off else []
    if failed:
        return [f"After these steps: {describe_failure(failed[0])}", *lost]
    others = [failure for failure in results.failed if failure["error"] not in _LAUNCHER_ERRORS]
    if ended and others:
        return [f"After these steps: {describe_failure(others[0])}", *lost]
    if ended is None:
        return ["After these steps the command did not end by itself and was stopped.", *lost]
    if ended > 0:
        return [f"After these steps the command ended with exit code {ended}.", *lost]
    if ended < 0:
        return [f"After these steps the command was ended by {name_signal(-ended)}.", *lost]
    return lost


def _count_idle_elements(traces: Sequence[Trace]) -> int:
    """Return the most elements of one rank that only optimizers would train which made no step."""
    return max(int(trace.script.get("idle_elements", 0)) for trace in traces)


def _find_branch(traces: Sequence[Trace]) -> str | None:
    """Return the first branch that a rank took by a computed number, as it is listed among the assumptions."""
    return next((text for trace in traces for text in trace.assumed if "from a computed number" in text), None)


def _explain_no_step(idle_elements: int, traces: Sequence[Trace]) -> str:
    """Return why a command with an optimizer that made no step has no answer."""
    branch = _find_branch(traces)
    return (
        f"Cannot say whether it fits: the command has an optimizer of {idle_elements:,} elements and ended before it "
        "made a step, so that neither its states nor a later step were seen."
        + (f" It decided by a number that no ghost computes ({branch})." if branch else "")
        + " Run it with arguments by which it trains for at least one step."
    )


def _note_early(done: int, branch: str | None) -> str:
    """Return the note about a command that ended after its first step; `branch` is one on a computed number."""
    why = "" if branch is None else f", perhaps because it decided by a computed number ({branch})"
    return (
        f"The command ended by itself after {pluralise(done, 'optimizer step')}{why}: these numbers do not include a "
        "later step, which has optimizer states beside its activations."
    )


def explain_failure(trace: Trace) -> str:
    """Return a sentence about the failure of a rank, with what to do about it if that is known."""
    outcome = trace.outcome
    message = _shorten(str(outcome.get("message")))
    description = describe_failure(outcome_with_cuda(trace))
    if ooms := trace.peaks.get("ooms", 0):
        return f"{description} {_note_ooms(ooms)}"
    if "invalid device ordinal" in message:
        count = trace.device.get("devices", 1)
        return f"{description} The ghost machine has {pluralise(count, 'GPU')}; name more with --gpu, such as 8xt4."
    if _NO_MACHINE_CODE.search(message):
        return f"{description} A library has no machine code for this card; an older version of it may have."
    if outcome.get("error") not in VALUE_ERRORS or not outcome.get("computed_reads"):
        return description
    return f"{description} If it needs a value that only a real GPU computes, skip that part in the dry-run."


def outcome_with_cuda(trace: Trace) -> dict[str, Any]:
    """Return the outcome of a rank and the version of CUDA of its torch."""
    return {**trace.outcome, "cuda": trace.versions.get("cuda")}


def describe_failure(outcome: Mapping[str, Any]) -> str:
    """Return a sentence about an error and its place; a known error gets its likely cause."""
    message = _shorten(str(outcome.get("message")))
    if other := _OTHER_ALLOCATOR.search(message):
        return f"The command allocates with {other[1]}. {ONE_ALLOCATOR}"
    stack = outcome.get("stack")
    where = f" (at {locate_failure(stack)})" if stack else ""
    kind = outcome.get("error")
    description = f"The command failed: {message if message == kind else f'{kind}: {message}'}{where}."
    if "No CUDA GPUs are available" in message:
        return (
            f"{description} The ghost machine has the GPUs of --gpu, numbered from 0: does the script set "
            "CUDA_VISIBLE_DEVICES to others?"
        )
    if "Address already in use" in message:
        return f"{description} Another program of this machine has the port; name a free one, such as --port 8001."
    symbol, cuda = _UNDEFINED.search(message), outcome.get("cuda")
    if symbol is None:
        return description
    return (
        f"{description} The ghost has the public functions of CUDA 12 and 13, and no {symbol[1]}: was this library "
        f"built for another CUDA than torch's{f', which is {cuda}' if cuda else ''}?"
    )


def _note_ooms(ooms: int) -> str:
    """Return the note about a command that caught out-of-memory errors and failed later with an error of its own."""
    return f"It had run out of GPU memory {pluralise(ooms, 'time')} before."


def locate_failure(stack: Sequence[str]) -> str:
    """Return the last frame of a stack, with the last one in the program's own code if that is another."""
    own = [frame for frame in stack if not any(part in frame for part in _LIBRARIES)]
    return stack[-1] if not own or own[-1] == stack[-1] else f"{own[-1]}, in {stack[-1]}"


def _suggest_time(command: Sequence[str], results: ProcessResults) -> str:
    """Return what to do about a command that takes too long: several ranks take turns on the processor.

    Ranks that a program starts by itself as commands (Lightning, Fabric) are run alone by `--rank`, too.
    """
    starts_commands = not any(_FORKED.search(name) for _, name in results.names.values())
    has_ranks = starts_commands and len({rank for rank, _ in results.names.values()}) > 1
    if has_ranks or launchers.is_launched(list(command)):
        return "Give it more time with --timeout, or run one of its ranks alone with --rank 0."
    return "Give it more time with --timeout."


def _describe_stop(trace: Trace, timeout_seconds: float, steps: int | None) -> str:
    """Return a sentence about the progress of a command that was stopped at the time limit."""
    outcome = trace.outcome
    wanted = pluralise(trace.steps, "optimizer step") if steps is None else pluralise(steps, "optimizer step")
    done = f"{'' if steps is None else f'{trace.steps} of '}{wanted} {'was' if steps == 1 else 'were'} done"
    description = f"The command was stopped after {timeout_seconds:.0f} s, when {done} and at most "
    description += f"{format_size(trace.peaks.get('allocated_bytes', 0))} had been allocated"
    if outcome.get("kind") != "stopped":
        return f"{description}."
    module = f" in {outcome['module']}" if outcome.get("module") else ""
    stack = outcome.get("stack") or ()
    where = f" (at {locate_failure(stack)})" if stack else ""
    return f"{description}; it was in step {outcome['step']}, {outcome['phase']}{module}{where}."


def _note_other_process(trace: Trace) -> str:
    """Return the note about a process on a GPU for which another process is reported."""
    process = trace.script.get("name", "Another process of the command")
    ending = " and ran out of memory" if trace.outcome.get("kind") == "oom" else ""
    return (
        f"GPU {trace.device.get('card', 0)} was also used by {process}{ending}: "
        f"{pluralise(trace.steps, 'optimizer step')}, at most "
        f"{format_size(trace.peaks.get('allocated_bytes', 0))} allocated, "
        f"{format_size(trace.peaks.get('reserved_bytes', 0))} reserved, and a context of its own."
    )


def describe_cut_off(cut_off: Sequence[dict[str, Any]]) -> str:
    """Return a sentence about processes that ended without a trace."""
    processes = [_describe_progress(process) for process in cut_off[:4]]
    more = f", and {len(cut_off) - 4} more" if len(cut_off) > 4 else ""
    return f"Ended without a trace: {'; '.join(processes)}{more}."


def _describe_progress(process: dict[str, Any]) -> str:
    """Return how progress a process came, and the memory that it held by then."""
    rank, steps = process["rank"], process["steps"]
    if not steps:
        return f"rank {rank} before its first optimizer step"
    return (
        f"rank {rank} after {pluralise(steps, 'optimizer step')}, with at most "
        f"{format_size(process['peaks']['reserved_bytes'])} reserved on the GPU and "
        f"{format_size(process['host_bytes'])} resident "
        "on the host until the last one"
    )


def _shorten(message: str, most: int = 400) -> str:
    """Return a message without the C++ frames that torch appends, cut at `most` characters."""
    message = message.split(" Exception raised from ")[0]
    return message if len(message) <= most else f"{message[:most]} ..."


def _explain_no_trace(command: list[str], results: ProcessResults, ended: int | None, timeout_seconds: float) -> str:
    """Return why the command left no trace, with what to do about it if that is known."""
    progress = f" {describe_cut_off(results.cut_off)}" if results.cut_off else ""
    if ended is None:
        where = progress or " It had not used the GPU until then."
        return f"The command was stopped after {timeout_seconds:.0f} s.{where} {_suggest_time(command, results)}"
    if ended < 0:
        name = name_signal(-ended)
        why = " A host that runs out of memory ends processes like this." if name == "SIGKILL" else ""
        return f"The command was ended by {name}; its own message is above.{progress}{why}"
    failed = [failure for failure in results.failed if failure["error"] not in _LAUNCHER_ERRORS]
    if ended != 0 and failed:
        return f"{describe_failure(failed[0])}{progress}"
    own = " Its own message is above." if ended != 0 or progress else ""
    if not results.reached:
        return f"The command ended with exit code {ended}. {_NOT_REACHED}{own}"
    if own:
        when = f".{progress}" if progress else " before it used the GPU."
        return f"The command ended with exit code {ended}{when}{own}{_note_missing_packages(results.missing)}"
    if results.missing:
        return (
            f"The command {shlex.join(command)!r} ended without using a GPU.{_note_missing_packages(results.missing)}"
        )
    return _explain_no_gpu(command, "ended without using a GPU")


def _note_missing_packages(names: Sequence[str]) -> str:
    """Return a sentence about missing packages that the program imports; it may do without them."""
    if not names:
        return ""
    listed = ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
    return f" It asked for {listed}, which {'is' if len(names) == 1 else 'are'} not installed here."


def name_signal(number: int) -> str:
    """Return the name of a signal; real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _explain_no_gpu(command: list[str], what: str) -> str:
    """Return the error about a command that did not train on the GPU."""
    return (
        f"The command {shlex.join(command)!r} {what}. Does it train, and does it choose the GPU "
        "when torch.cuda.is_available() is true?"
    )
