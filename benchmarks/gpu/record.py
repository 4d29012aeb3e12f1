"""Run the matrix of training steps on the GPU of this machine and write down what it did.

    python benchmarks/gpu/record.py --out records.jsonl --facts

One line of JSON a case, appended as soon as the case has ended: a run that is stopped loses nothing, and the next
one leaves out what is already there.  `compare.py` sets such files of a real GPU and of the ghost side by side.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking whether there is a GPU must not open it

import isolated
from case import Case, chosen
from matrix import matrix

LARGE = ("trace", "kernels")
"""Fields that go to a file of their own beside the records, as they would drown them."""


def main() -> int:
    options = _options()
    warnings.simplefilter("ignore")
    out = Path(options.out)
    done = _done(out)
    deadline = time.monotonic() + options.budget_seconds
    began = time.monotonic()
    wanted = chosen(matrix(), options.only)
    for path, there in ((options.like, True), (options.unlike, False)):
        names = _recorded(Path(path)) if path else set()
        wanted = [case for case in wanted if not path or (case.name in names) == there]
    cases = _possible(case for case in wanted if case.name not in done)
    if options.source == "ghost":
        _take_the_usual_paths()
    _import(cases, lean=options.lean)
    print(f"imports {time.monotonic() - began:.1f} s; {len(cases)} cases to do, {len(done)} done", flush=True)
    if not _forked_children_work():
        return _again_with_fewer_imports(options)
    if options.facts:
        _record_facts(out, done, deadline, options.source)
    return _record_cases(cases, out, deadline, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="file of JSON lines, appended to")
    parser.add_argument("--budget-seconds", type=float, default=520, help="begin no case after this long")
    parser.add_argument("--case-seconds", type=float, default=75, help="stop a case after this long")
    parser.add_argument("--only", default="*", help="cases whose names match this shell pattern")
    parser.add_argument("--like", metavar="FILE", help="only cases that this file of records has")
    parser.add_argument("--unlike", metavar="FILE", help="only cases that it has not")
    parser.add_argument("--source", choices=("real", "ghost"), default="real", help="what the GPU is")
    parser.add_argument("--facts", action="store_true", help="first the properties of the card and single operations")
    parser.add_argument("--retry", action="store_true", help="also the cases that ended with an error before")
    parser.add_argument("--lean", action="store_true", help="import only torch before children are forked")
    return parser.parse_args()


def _done(out: Path) -> set[str]:
    """Names of the cases and facts that `out` already holds; a half-written last line is cut off."""
    if not out.exists():
        return set()
    whole = out.read_bytes()
    complete = whole[: whole.rfind(b"\n") + 1]
    if len(complete) != len(whole):
        out.write_bytes(complete)
    return _recorded(out, failed="--retry" not in sys.argv)


def _recorded(path: Path, *, failed: bool = True) -> set[str]:
    """Names of the cases and facts in a file, also of those that failed unless they are not wanted."""
    lines = map(json.loads, path.read_bytes().splitlines())
    return {line.get("case") or line.get("fact") for line in lines if failed or "error" not in line}


def _possible(cases: Iterable[Case]) -> list[Case]:
    """Those whose packages are installed; of the others it is said what is missing, once for each package."""
    lacking = {case.name: (case, case.lacking()) for case in cases}
    counts = Counter(reason for _, reason in lacking.values() if reason is not None)
    for reason, count in counts.items():
        print(f"{count} cases are left out: {reason}", flush=True)
    return [case for case, reason in lacking.values() if reason is None]


def _import(cases: Iterable[Case], *, lean: bool) -> None:
    """Everything a child would import, so that it need not; what would open the GPU is left to the children."""
    if lean:
        importlib.import_module("torch")
        return
    from tonnage.workers.preload import try_import

    cases = list(cases)
    for name in dict.fromkeys(name for case in cases for name in case.libraries):
        try_import(name)
    for name in (
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "torch.distributed.optim",
        "torch.nn.parallel",
        "torch.utils.checkpoint",
        "accelerate",
        "peft",
        "measure",
        "facts",
    ):
        try_import(name)
    for kind in sorted({case.job.model.config["model_type"] for case in cases}):
        try_import(f"transformers.models.{kind}.modeling_{kind}")


def _take_the_usual_paths() -> None:
    """A ghost computes no values; where control flow depends on them, the same policy as in every prediction."""
    import torch

    from tonnage.ghost import environment as ghost_environment

    sys.path.extend(ghost_environment.PATH.split(os.pathsep))
    from tonnage_inside import values
    from tonnage_recorder import native

    values.install(values.Policy(torch, native.load()))


def _forked_children_work() -> bool:
    return "error" not in isolated.run(_touch, timeout_seconds=120)


def _touch() -> Iterator[dict[str, Any]]:
    import torch

    yield {"sum": float(torch.ones(8, device="cuda").sum())}


def _again_with_fewer_imports(options: argparse.Namespace) -> int:
    print("A forked process cannot use CUDA here: some import has already opened it.", file=sys.stderr, flush=True)
    if options.lean:
        return 3
    os.execv(sys.executable, [sys.executable, *sys.argv, "--lean"])


def _record_facts(out: Path, done: set[str], deadline: float, source: str) -> None:
    import facts

    began, count, failed = time.monotonic(), 0, 0
    for line in facts.record(done, source=source, deadline=deadline):
        _append(out, line)
        count += 1
        if "error" in line:
            failed += 1
            print(f"{line['fact']}: {line['error'].splitlines()[0][:160]}", flush=True)
    print(f"{count} facts in {time.monotonic() - began:.0f} s, {failed} failed", flush=True)


def _record_cases(cases: list[Case], out: Path, deadline: float, options: argparse.Namespace) -> int:
    failed = left = 0
    for case in cases:
        if time.monotonic() > deadline:
            left += 1
            continue
        began = time.monotonic()
        timeout = min(options.case_seconds, max(10.0, deadline + 15 - time.monotonic()))
        record = isolated.run(lambda case=case: _measured(case, options.source), timeout_seconds=timeout)  # type: ignore[misc]
        record = {"case": case.name, **record, "process_seconds": round(time.monotonic() - began, 3)}
        failed += "error" in record
        _append(out, record)
        print(_summary(record), flush=True)
    print(f"{len(cases) - left} cases run, {failed} failed, {left} left for the next call", flush=True)
    return 0


def _measured(case: Case, source: str) -> Iterator[dict[str, Any]]:
    import measure

    measure.apply_environment(case)
    yield from measure.measure(case, source=source)


def _append(out: Path, record: dict[str, Any]) -> None:
    large = {key: record.pop(key) for key in LARGE if key in record}
    if large:
        _append_line(out.with_name(out.stem + ".events.jsonl"), {"case": record["case"], **large})
    _append_line(out, record)


def _append_line(path: Path, value: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(value, separators=(",", ":")) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _summary(record: dict[str, Any]) -> str:
    gib = 2**30
    if "error" in record:
        return f"{record['case']}: {record['error'].splitlines()[0][:160]} [{record['process_seconds']} s]"
    phases = [peaks for step in record.get("steps", []) for peaks in step["phases"].values()]
    phases += list(record.get("load", {}).get("phases", {}).values()) + list(record.get("unfinished", {}).values())
    allocated, reserved = (
        max((p[key] for p in phases), default=0) / gib for key in ("allocated_bytes", "reserved_bytes")
    )
    timing = record.get("timing")
    speed = f"{timing['median_seconds']:.4f} s/step" if timing else ""
    end = " OOM" if "oom" in record else ""
    outside = record["end"]["cuda_used_bytes"] - record["end"]["reserved_bytes"]
    return (
        f"{record['case']}: allocated {allocated:.3f} reserved {reserved:.3f} outside {outside / gib:.3f} GiB"
        f" {speed}{end} [{record['process_seconds']} s]"
    )


if __name__ == "__main__":
    sys.exit(main())
