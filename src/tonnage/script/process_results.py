"""The traces and errors that the processes of a dry-run command left in the folder of the run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tonnage.recorder.tonnage_recorder.engines import FACTS, SERVED
from tonnage.script import further
from tonnage.trace import operations
from tonnage.trace import trace as traces
from tonnage.trace.trace import Trace


@dataclass(frozen=True, kw_only=True)
class ProcessResults:
    """Everything that the processes of the command left."""

    traces: tuple[Trace, ...]
    """The trace of each rank, in order."""
    others: tuple[Trace, ...]
    """Traces of further processes with the rank of one of those: a program may start others that use the GPU.

    Their `script` has the `name` of the process, if it is known.
    """
    cut_off: tuple[dict[str, Any], ...]
    """Progress of the processes that left no trace: rank, name, steps, peaks, host_bytes."""
    names: Mapping[int, tuple[int, str]]
    """Rank and name of each process that used the GPU, by its process id."""
    failed: tuple[dict[str, Any], ...] = ()
    """Errors of Python processes, the earliest first: message, error, stack, cuda."""
    reached: bool = True
    """True if a Python of the command found the ghost."""
    missing: tuple[str, ...] = ()
    """Packages that the program's own code imports and that are not installed."""
    engines: tuple[dict[str, Any], ...] = ()
    """Facts of the processes of an inference engine, the oldest first (`tonnage_recorder.engines`)."""
    unwound: tuple[str, ...] = ()
    """Places of loops that had to be unwound."""
    served: bool = False
    """True if an engine's server was ready for requests, by which the command was ended."""
    is_counting: bool = False
    """True if a process ended within the step whose operations were counted."""

    @property
    def needs_more(self) -> bool:
        """Return True if a process needed more behind its steps than can be told from a run with a counted step.

        If that step had no end, all that came behind the steps was taken for a part of it, or was never reached.
        """
        further_needs = [trace.script.get("further") or {} for trace in (*self.traces, *self.others)]
        return self.is_counting or any(each.get("needs_more") for each in further_needs)

    def with_counted_steps(self, counting: ProcessResults) -> ProcessResults:
        """Return these results with the operations that another run of the command counted, rank by rank."""
        worked = {trace.rank: trace.worked for trace in counting.traces}
        return replace(self, traces=tuple(replace(trace, worked=worked.get(trace.rank)) for trace in self.traces))


def collect_results(folder: Path, ended: int | None = None) -> ProcessResults:
    """Return the results in the folder of a run; `ended` is the command's exit code, if it ended by itself.

    Of several processes with one rank, the one that ran out of memory has the rank's trace, or else, of those that
    train, the one that needs most.
    """
    failed = tuple(json.loads(path.read_text()) for path in _sort_by_age(folder.glob("*.failed")))
    paths = [path for path in sorted(folder.glob("*.trace")) if not path.name.endswith(_REST)]
    started = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.progress"))}
    loaded = {path.stem: _load_trace(path, started.get(path.stem, {}), bool(ended)) for path in paths}
    by_rank: dict[int, list[Trace]] = {}
    for trace in sorted(loaded.values(), key=_sort_key):
        by_rank.setdefault(trace.rank, []).append(trace)
    cut_off = [progress for process, progress in started.items() if process not in loaded]
    return ProcessResults(
        engines=tuple(json.loads(path.read_text()) for path in _sort_by_age(folder.glob(f"*{FACTS}"))),
        served=(folder / SERVED).exists(),
        traces=tuple(by_rank[rank][-1] for rank in sorted(by_rank)),
        others=tuple(trace for rank in sorted(by_rank) for trace in by_rank[rank][:-1]),
        cut_off=tuple(sorted(cut_off, key=lambda process: int(process["rank"]))),
        names={int(process): (int(each["rank"]), str(each["name"])) for process, each in started.items()},
        failed=failed,
        unwound=tuple(sorted({str(each["unwound"]) for each in started.values() if each.get("unwound")})),
        reached=(folder / "reached").exists(),
        is_counting=any(started[process].get("is_counting") for process in loaded if process in started),
        missing=tuple(
            name for path in _sort_by_age(folder.glob("*.missing")) for name in json.loads(path.read_text())["names"]
        ),
    )


_REST: Final = ".rest.trace"
"""Ending of the file with all of a process's trace, if its first one was written when a loop had made its steps."""


def _load_trace(path: Path, progress: Mapping[str, Any], is_failed: bool) -> Trace:
    """Return the trace of a process, with its name, and with the operations of one more step if they were counted.

    If the command has failed (`is_failed`) and this process did nothing after memory ran out, that is why: pools and
    sweeps catch the error and tell it elsewhere.  If the process needed more after its first loop, this is the trace
    of all that it did, with a step that was counted there only if `needs_more`.  What came after is in `script`:
    `afterwards` has the error by which it failed, `further` the rest's loops and phases with their peaks.
    """
    trace = replace(traces.load(path), worked=operations.load(path.with_suffix(".worked")))
    if "name" in progress:
        trace = replace(trace, script={**trace.script, "name": progress["name"]})
    rest_path = path.with_suffix(_REST)
    if not rest_path.exists():
        return trace
    rest = traces.load(rest_path)
    failed = rest.outcome if rest.outcome.get("kind") == "failed" else {}
    facts = {
        **trace.script,
        "afterwards": failed,
        "further": further.describe(trace, rest),
    }
    if rest.script.get("counted_marks") and not (facts["further"]["needs_more"] or progress.get("is_counting")):
        return replace(trace, script=facts)
    if is_failed and rest.outcome.get("kind") != "oom" and rest.script.get("shortage"):
        rest = replace(rest, outcome=rest.script["shortage"])
    is_larger = rest.outcome.get("kind") == "oom" or any(
        rest.peaks.get(name, 0) > trace.peaks.get(name, 0) for name in ("allocated_bytes", "reserved_bytes")
    )
    if not is_larger:
        return replace(trace, script=facts)
    outcome = {"kind": "completed"} if failed else rest.outcome
    return replace(rest, worked=trace.worked, outcome=outcome, script={**rest.script, **facts})


def _sort_by_age(paths: Iterable[Path]) -> list[Path]:
    """Return the files, the oldest first."""
    return sorted(paths, key=lambda path: path.stat().st_mtime_ns)


def _sort_key(trace: Trace) -> tuple[bool, bool, int, int]:
    """Return the key that sorts the traces of one rank, the one to report last."""
    reserved_bytes = trace.peaks.get("reserved_bytes", 0)
    return trace.outcome.get("kind") == "oom", trace.steps > 0, reserved_bytes, trace.event_count
