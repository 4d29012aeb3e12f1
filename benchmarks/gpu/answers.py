"""Set what `tonnage estimate` answers beside what a real GPU did: memory, the whole process, and seconds.

    python benchmarks/gpu/answers.py measurements/h200-2026-11-26.jsonl --torch 2.11.0

`compare.py` runs the recorder itself on a ghost; this asks the product, as a user would, for every recorded step that
ran to its end.  The libraries are those of the interpreter: run it where the recorded versions are installed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from statistics import median
from typing import Any

import compare
import recorded

from tonnage.case import Case
from tonnage.errors import TonnageError
from tonnage.estimates import predict
from tonnage.estimates.estimate import Estimate
from tonnage.workers.worker import Worker

Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One recorded step and what is said of it; percentages are of what was measured."""

    name: str
    """The case."""
    allocated_percent: float
    """How far the allocated peak is off."""
    reserved_percent: float
    """How far the reserved peak is off."""
    process_percent: float
    """How far the process peak is off."""
    within: bool
    """Whether the process peak is in the interval that was given."""
    seconds: float | None
    """Measured, of one step; None where steps are unlike each other."""
    seconds_percent: float | None
    """How far the step's seconds are off; None where they are not known."""
    in_time: bool
    """Whether the seconds are in the interval that was given."""


def main() -> int:
    options = _options()
    found = compare.read(Path(options.real)).cases
    records = [line for name, line in found.items() if fnmatch(name, options.only) and _whole(line)]
    with Worker(options.torch) as worker:
        answers = list(_answered(records, worker))
    print("\n".join(_report(answers)))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("real", help="records of a real GPU")
    parser.add_argument("--torch", help="version of torch; default: the installed one's")
    parser.add_argument("--only", default="*", help="cases whose names match this shell pattern")
    return parser.parse_args()


def _whole(record: Line) -> bool:
    """Whether it ran to its end on all of the card: what the allocator may reserve is no option of an estimate."""
    return "oom" not in record and record["limit_bytes"] is None


def _answered(records: Iterable[Line], worker: Worker) -> Iterator[Answer]:
    for record in records:
        print(record["case"], file=sys.stderr)
        try:
            yield answer(record, _estimate(record, worker))
        except TonnageError as error:
            print(f"  {error}", file=sys.stderr)


def _estimate(record: Line, worker: Worker) -> Estimate:
    job, plan = recorded.asked(record)
    cluster = recorded.card(record)
    made, repeated = predict.usual_steps(Case(job, plan, cluster))
    return predict.estimate(Case(job, plan, cluster), steps=made, repeated=repeated, worker=worker).estimate


def answer(record: Line, estimate: Estimate) -> Answer:
    """A record of `measure.py` beside an Estimate of the same."""
    real, said = compare.peaks(record), estimate.peak
    process = _of_process(record)
    seconds = record.get("timing", {}).get("median_seconds")
    low, high = estimate.time.get("low_seconds"), estimate.time.get("high_seconds")
    told = estimate.time.get("step_seconds")
    return Answer(
        name=record["case"],
        allocated_percent=compare.percent(said.allocated_bytes, real.allocated_bytes),
        reserved_percent=compare.percent(said.reserved_bytes, real.reserved_bytes),
        process_percent=compare.percent(said.process_bytes, process),
        within=said.low_bytes <= process <= said.high_bytes,
        seconds=seconds,
        seconds_percent=None if seconds is None or told is None else compare.percent(told, seconds),
        in_time=None not in (seconds, low, high) and low <= seconds <= high,
    )


def _of_process(record: Line) -> int:
    """Most bytes that nvidia-smi's library said of the process, which has no managed memory; else of the device."""
    said = [step["nvml_process_bytes"] for step in record["steps"] if step["nvml_process_bytes"]]
    return max(said, default=compare.peaks(record).process_bytes or 0)


def _report(answers: list[Answer]) -> Iterator[str]:
    yield "| step | allocated % | reserved % | process % | in interval | seconds | % | in interval |"
    yield "|---|---:|---:|---:|---|---:|---:|---|"
    for one in answers:
        memory = f"{one.allocated_percent:+.2f} | {one.reserved_percent:+.2f} | {one.process_percent:+.2f}"
        seconds = "" if one.seconds is None else f"{one.seconds:.4f}"
        off = "" if one.seconds_percent is None else f"{one.seconds_percent:+.1f}"
        inside = _mark(one.in_time) if off else ""
        yield f"| {one.name} | {memory} | {_mark(one.within)} | {seconds} | {off} | {inside} |"
    yield ""
    for what in ("allocated", "reserved", "process", "seconds"):
        yield _summary(what, [getattr(one, f"{what}_percent") for one in answers])
    timed = [one.in_time for one in answers if one.seconds_percent is not None]
    yield f"- in their interval: process {sum(one.within for one in answers)} of {len(answers)}, seconds {sum(timed)}"


def _summary(what: str, percentages: list[float | None]) -> str:
    off = sorted(abs(value) for value in percentages if value is not None)
    if not off:
        return f"- {what}: none"
    high = off[min(len(off) - 1, int(0.95 * len(off)))]
    return f"- {what}: {len(off)} steps, median {median(off):.3f} %, p95 {high:.3f} %, worst {off[-1]:.3f} %"


def _mark(inside: bool) -> str:
    return "yes" if inside else "no"


if __name__ == "__main__":
    sys.exit(main())
