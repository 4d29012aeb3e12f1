"""Set what a real GPU did beside what the ghost says of the same steps and operations.

    python benchmarks/gpu/compare.py measurements/h200.jsonl --torch 2.11.0

Runs the cases and operations of the file on a ghost of the same card (or takes `--ghost FILE`, recorded before), and
prints Markdown: each case's allocated, reserved and process memory, how far apart they are, the first allocator event
that differs, and the operations whose allocations differ.  Needs neither a GPU nor torch in this process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any, Final

import packed

from tonnage.catalog.devices import find_device
from tonnage.errors import UnknownDevice
from tonnage.units import GIB

HERE: Final = Path(__file__).parent
PERCENT: Final = 100.0
Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A file of records, by case and by fact."""

    cases: dict[str, Line]
    """Records of training steps that did not fail."""
    facts: dict[str, Line]
    """Facts of the card and operations that did not fail."""
    events: dict[str, Line]
    """The allocator's events of the traced cases: packed columns."""
    failures: dict[str, str]
    """The first line of the error of everything else."""


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """The highest use of one run."""

    allocated_bytes: int
    """Most bytes handed out by the caching allocator in the recorded steps."""
    reserved_bytes: int
    """Most bytes it held from the driver."""
    process_bytes: int | None
    """Most bytes the driver counted as used, less what was used before; None where it was not asked."""

    @property
    def outside_bytes(self) -> int | None:
        """What the process held besides the allocator's: context, kernels, libraries."""
        return None if self.process_bytes is None else self.process_bytes - self.reserved_bytes


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One case on both."""

    name: str
    """The case."""
    real: Peaks
    """On the real GPU."""
    ghost: Peaks
    """On the ghost."""
    real_oom: str | None
    """The phase in which the real one ran out of memory; None if it did not."""
    ghost_oom: str | None
    """The same of the ghost."""

    @property
    def allocated_percent(self) -> float:
        """How far the ghost's allocated peak is from the real one."""
        return percent(self.ghost.allocated_bytes, self.real.allocated_bytes)

    @property
    def reserved_percent(self) -> float:
        """How far the ghost's reserved peak is from the real one."""
        return percent(self.ghost.reserved_bytes, self.real.reserved_bytes)


def main() -> int:
    options = _options()
    real = read(Path(options.real))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(options.ghost) if options.ghost else _run_on_ghost(real, options, Path(folder))
        ghost = read(path)
    print("\n".join(_report(real, ghost)))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("real", help="records of a real GPU")
    parser.add_argument("--ghost", help="records of the ghost, instead of making them")
    parser.add_argument("--keep", help="keep the ghost's records in this file")
    parser.add_argument("--python", default=sys.executable, help="interpreter with the transformers of the records")
    parser.add_argument("--torch", help="version of torch; default: the records'")
    parser.add_argument("--only", default="*", help="cases whose names match this shell pattern")
    return parser.parse_args()


def read(path: Path) -> Recording:
    """The records of a file and of the events beside it; the last record of a name counts."""
    cases: dict[str, Line] = {}
    facts: dict[str, Line] = {}
    failures: dict[str, str] = {}
    for line in _lines(path):
        name = line.get("case") or line["fact"]
        trouble = line.get("error") or line.get("failed")
        if trouble:
            failures[name] = trouble.splitlines()[0]
        else:
            failures.pop(name, None)
            (cases if "case" in line else facts)[name] = line
    beside = path.with_name(path.stem + ".events.jsonl")
    events = {line["case"]: line for line in _lines(beside)} if beside.exists() else {}
    return Recording(cases=cases, facts=facts, events=events, failures=failures)


def _lines(path: Path) -> Iterator[Line]:
    with path.open() as file:
        for line in file:
            yield json.loads(line)


def _run_on_ghost(real: Recording, options: argparse.Namespace, folder: Path) -> Path:
    """The same command on a ghost of the recorded card."""
    from tonnage.ghost import environment as ghost_environment
    from tonnage.ghost import wheel

    out = Path(options.keep) if options.keep else folder / "ghost.jsonl"
    versions = next(iter(real.cases.values()))["versions"]
    torch = wheel.find(options.python, options.torch or versions["torch"].split("+")[0])
    variables = ghost_environment.environment(torch=torch, **ghost_settings(real))
    source = str(HERE.parent.parent / "src")
    variables["PYTHONPATH"] = os.pathsep.join([variables["PYTHONPATH"], source])
    command = [options.python, str(HERE / "record.py"), "--source", "ghost", "--out", str(out)]
    command += ["--only", options.only, "--like", options.real, "--budget-seconds", "3600"]
    command += ["--facts"] if real.facts else []
    subprocess.run(command, env=variables, check=True, stdout=sys.stderr)
    return out


def ghost_settings(real: Recording) -> dict[str, Any]:
    """The recorded card as the ghost's settings: by its own facts, else the catalog's, else Hopper's."""
    versions = next(iter(real.cases.values()))["versions"]
    properties = real.facts.get("device", {}).get("properties")
    return {
        **(_of_catalog(versions["gpu"]) if properties is None else _by_facts(properties)),
        "name": versions["gpu"],
        "total_bytes": versions["total_bytes"],
        "capability": versions["capability"],
    }


def _by_facts(properties: Line) -> dict[str, Any]:
    found = {
        "sms": properties.get("multi_processor_count"),
        "threads_per_sm": properties.get("max_threads_per_multi_processor"),
        "l2_bytes": properties.get("L2_cache_size"),
        "shared_per_block_bytes": properties.get("shared_memory_per_block_optin"),
        "shared_per_sm_bytes": properties.get("shared_memory_per_multiprocessor"),
        "registers_per_sm": properties.get("regs_per_multiprocessor"),
    }
    return {key: value for key, value in found.items() if value is not None}


def _of_catalog(name: str) -> dict[str, Any]:
    """What the catalog has of the card of this name, but for its context, which records leave out; or nothing."""
    try:
        settings = find_device(name).ghost_settings()
    except UnknownDevice:
        return {}
    known = {key.removeprefix("GHOST_").lower(): value for key, value in settings.items()}
    return {key: value for key, value in known.items() if key != "context_bytes"}


def peaks(record: Line) -> Peaks:
    """The highest of all recorded phases, those cut short by an out-of-memory error included."""
    phases = [*record["load"]["phases"].values()] if "load" in record else []
    phases += [phase for step in record.get("steps", ()) for phase in step["phases"].values()]
    phases += record.get("unfinished", {}).values()
    used = [phase["cuda_used_bytes"] for phase in phases if phase.get("cuda_used_bytes") is not None]
    return Peaks(
        allocated_bytes=max(phase["allocated_bytes"] for phase in phases),
        reserved_bytes=max(phase["reserved_bytes"] for phase in phases),
        process_bytes=max(used) if used else None,
    )


def compare(real: Recording, ghost: Recording) -> list[Comparison]:
    """Every case that both recordings hold, in the real one's order."""
    return [
        Comparison(
            name=name,
            real=peaks(record),
            ghost=peaks(ghost.cases[name]),
            real_oom=record.get("oom", {}).get("phase"),
            ghost_oom=ghost.cases[name].get("oom", {}).get("phase"),
        )
        for name, record in real.cases.items()
        if name in ghost.cases
    ]


def phases(real: Recording, ghost: Recording) -> list[float]:
    """Of every phase of each step that both ran to the end: how far the ghost's allocated peak is off, in percent."""
    found = []
    for name, record in real.cases.items():
        other = ghost.cases.get(name, {})
        if "oom" in record or "oom" in other:
            continue
        for ours, theirs in zip(record["steps"], other.get("steps", ()), strict=False):
            both = ours["phases"].keys() & theirs["phases"].keys()
            pairs = ((ours["phases"][phase], theirs["phases"][phase]) for phase in both)
            found += [percent(two["allocated_bytes"], one["allocated_bytes"]) for one, two in pairs]
    return found


def first_difference(real: Line, ghost: Line) -> tuple[int, int, int | None, str]:
    """Events of the real trace and of the ghost's, the first one that differs (None: none), and what differs there.

    Compared are action, size, stream, segment and offset; `real` and `ghost` hold packed columns under `trace`.
    """
    ours, theirs = (list(_rows(packed.unpack(line["trace"]))) for line in (real, ghost))
    for position, (one, other) in enumerate(zip_longest(ours, theirs)):
        if one != other:
            return len(ours), len(theirs), position, f"{_event(one)} / {_event(other)}"
    return len(ours), len(theirs), None, ""


def equal_sizes(real: Line, ghost: Line) -> float:
    """The fraction of the real trace's requests, in order, that the ghost's has at the same place in its order."""
    ours, theirs = (
        [size for action, size, *_ in _rows(packed.unpack(line["trace"])) if action == 0] for line in (real, ghost)
    )
    same = sum(one == other for one, other in zip(ours, theirs, strict=False))
    return same / max(len(ours), len(theirs), 1)


def _rows(columns: dict[str, list[int]]) -> Iterator[tuple[int, ...]]:
    keys = ("action", "bytes", "stream", "segment", "offset")
    yield from zip(*(columns[key] for key in keys), strict=True)


def _event(row: tuple[int, ...] | None) -> str:
    if row is None:
        return "nothing"
    names = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map")
    action = names[row[0]] if row[0] < len(names) else str(row[0])
    return f"{action} {row[1]:,} B stream {row[2]} segment {row[3]}+{row[4]:,}"


def different_operations(real: Recording, ghost: Recording) -> list[tuple[str, list[int], list[int]]]:
    """Operations that ask the allocator for other sizes or in another order: name, the real sizes, the ghost's."""
    named = [name for name in real.facts if name.startswith("op ") and name in ghost.facts]
    pairs = [(name, real.facts[name]["first"], ghost.facts[name]["first"]) for name in named]
    return [(name.removeprefix("op "), one, other) for name, one, other in pairs if one != other]


def _report(real: Recording, ghost: Recording) -> Iterator[str]:
    compared = compare(real, ghost)
    if compared:
        yield from _case_table(compared)
        yield from _summary(compared)
        yield _of_phases(phases(real, ghost))
    yield from _trace_table(real, ghost)
    yield from _operation_table(real, ghost)
    yield from _failures(real, ghost)


def _case_table(compared: Iterable[Comparison]) -> Iterator[str]:
    yield "| case | allocated real | ghost | % | reserved real | ghost | % | outside real | out of memory |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---|"
    for one in compared:
        cells = [
            one.name,
            _gib(one.real.allocated_bytes),
            _gib(one.ghost.allocated_bytes),
            f"{one.allocated_percent:+.2f}",
            _gib(one.real.reserved_bytes),
            _gib(one.ghost.reserved_bytes),
            f"{one.reserved_percent:+.2f}",
            "" if one.real.outside_bytes is None else _gib(one.real.outside_bytes),
            _verdicts(one),
        ]
        yield f"| {' | '.join(cells)} |"


def _verdicts(one: Comparison) -> str:
    if one.real_oom == one.ghost_oom:
        return f"both, {one.real_oom}" if one.real_oom else ""
    return f"real {one.real_oom or 'fits'}, ghost {one.ghost_oom or 'fits'}"


def _summary(compared: list[Comparison]) -> Iterator[str]:
    """Medians over the cases that both ran to the end: where memory ran out, peaks only show the limit."""
    fits = [one for one in compared if not one.real_oom and not one.ghost_oom]
    agreed = sum((one.real_oom is None) == (one.ghost_oom is None) for one in compared)
    yield ""
    yield f"{len(compared)} cases; the same verdict in {agreed}; of the {len(fits)} that fit on both:"
    for what in ("allocated", "reserved"):
        off = sorted(abs(getattr(one, f"{what}_percent")) for one in fits)
        if off:
            worst, high = off[-1], off[min(len(off) - 1, int(0.95 * len(off)))]
            exact = sum(value == 0 for value in off)
            yield f"- {what}: median {median(off):.3f} %, p95 {high:.3f} %, worst {worst:.3f} %, {exact} to the byte"
    outside = [one.real.outside_bytes for one in compared if one.real.outside_bytes is not None]
    if outside:
        low, middle, high = min(outside), median(outside), max(outside)
        yield f"- outside the allocator: {_gib(low)} to {_gib(high)}, median {_gib(middle)} GiB"


def _of_phases(off: list[float]) -> str:
    exact, within = (sum(abs(value) <= most for value in off) for most in (0.0, 0.2))
    return f"- {len(off)} peaks of phases of steps: {exact} to the byte, {within} within 0.2 %"


def _trace_table(real: Recording, ghost: Recording) -> Iterator[str]:
    both = [name for name, line in real.events.items() if "trace" in line and "trace" in ghost.events.get(name, {})]
    if not both:
        return
    yield ""
    yield "| traced case | events real | ghost | first difference | same request sizes | real / ghost there |"
    yield "|---|---:|---:|---:|---:|---|"
    for name in both:
        ours, theirs, position, what = first_difference(real.events[name], ghost.events[name])
        same = equal_sizes(real.events[name], ghost.events[name])
        place = "none" if position is None else f"{position:,}"
        yield f"| {name} | {ours:,} | {theirs:,} | {place} | {same:.2%} | {what} |"


def _operation_table(real: Recording, ghost: Recording) -> Iterator[str]:
    different = different_operations(real, ghost)
    count = sum(name.startswith("op ") and name in ghost.facts for name in real.facts)
    if not count:
        return
    yield ""
    yield f"{count - len(different)} of {count} operations ask for the same sizes in the same order; the others:"
    yield ""
    yield "| operation | real | ghost |"
    yield "|---|---|---|"
    for name, one, other in different:
        yield f"| {name} | {_sizes(one)} | {_sizes(other)} |"


def _sizes(values: list[int]) -> str:
    shown = " ".join(f"{value:+}" for value in values[:24])
    return f"{shown} ... ({len(values)})" if len(values) > 24 else shown or "nothing"


def _failures(real: Recording, ghost: Recording) -> Iterator[str]:
    names = sorted({*real.failures, *ghost.failures} - (real.failures.keys() & ghost.failures.keys()))
    if names:
        yield ""
        yield "Failed on one of them only:"
    for name in names:
        where = "real" if name in real.failures else "ghost"
        yield f"- {name}, {where}: {(real.failures | ghost.failures)[name][:160]}"


def percent(value: float, reference: float) -> float:
    """How far a value is from a reference, of that; 0 of none."""
    return PERCENT * (value - reference) / reference if reference else 0.0


def _gib(count_bytes: float) -> str:
    return f"{count_bytes / GIB:.3f}"


if __name__ == "__main__":
    sys.exit(main())
