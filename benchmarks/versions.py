"""Runs the same jobs with several versions of torch and prints a table of what came out, for docs/versions.md.

    python benchmarks/versions.py 2.8.0 2.13.0 ...      without versions: the installed torch

A cell is the allocated and reserved peak in MiB, when torch's own counters say the same as the walk through its
allocator's events, and no function of NVIDIA's was called that the ghost does not have; else what went wrong.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import tonnage
from tonnage import dryrun, modelref, predict
from tonnage.device import parse_cluster
from tonnage.errors import TonnageError
from tonnage.ghost.pool import Worker
from tonnage.job import Job
from tonnage.plans import Plan
from tonnage.summary import Run
from tonnage.timeline import timeline
from tonnage.units import MIB

MODEL, SMALL = "llama-3.2-1b", "smollm2-135m"
ONE, EIGHT = "a100-80gb", "8xa100-80gb"
EXAMPLE = Path(__file__).parents[1] / "examples" / "lora.py"
JOBS: dict[str, tuple[str, str, Plan]] = {
    "full": (ONE, "full", Plan()),
    "lora, checkpointing": (ONE, "lora", Plan(precision="bf16-true", checkpointing="full", optimizer="adamw-fused")),
    "expandable": (ONE, "full", Plan(allocator="expandable")),
    "fp16-mixed, selective": (ONE, "full", Plan(precision="fp16-mixed", checkpointing="selective")),
    "ddp of 8": (EIGHT, "full", Plan(shard="ddp")),
    "zero3 of 8": (EIGHT, "full", Plan(shard="zero3", checkpointing="full")),
    "muon": (ONE, "full", Plan(optimizer="muon")),
    "full again": (ONE, "full", Plan()),
}
SCRIPT = "dry-run of examples/lora.py"


def cell(run: Callable[[], Run], facts: dict[str, str]) -> str:
    """What a run gave; its versions are added to `facts`."""
    try:
        made = run()
    except TonnageError as error:
        return str(error)
    trace = made.traces[0]
    facts.update(trace.versions)
    walked = timeline(trace)
    mine = {"allocated_bytes": walked.peak_allocated_bytes, "reserved_bytes": walked.peak_reserved_bytes}
    wrong = [f"{name}: {value} is not torch's {trace.peaks[name]}" for name, value in mine.items()]
    wrong = [text for text, name in zip(wrong, mine, strict=True) if mine[name] != trace.peaks[name]]
    wrong += [f"{name} called {count} times" for name, count in trace.unknown_calls.items()]
    if trace.steps != 3 or trace.outcome["kind"] != "completed":
        wrong.append(f"{trace.outcome['kind']} after {trace.steps} steps")
    return "; ".join(wrong) or f"{mine['allocated_bytes'] / MIB:.1f} / {mine['reserved_bytes'] / MIB:.0f}"


def estimates(version: str | None, facts: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Every job of JOBS in one warm worker."""
    with Worker(version) as worker:
        model = modelref.resolve(MODEL)
        for name, (gpu, method, plan) in JOBS.items():
            job = Job(model=model, method=method, seq_len=1024)
            yield name, cell(lambda: predict.estimate(job, plan, parse_cluster(gpu), worker=worker), facts)  # noqa: B023


def script(version: str | None, facts: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The example script on a small model's configuration."""
    with tempfile.TemporaryDirectory() as folder:
        catalog = Path(tonnage.__file__).parent / "catalog" / "models" / f"{SMALL}.json"
        shutil.copy(catalog, Path(folder) / "config.json")
        command = [sys.executable, str(EXAMPLE), folder]
        yield SCRIPT, cell(lambda: dryrun.run(command, parse_cluster(ONE), torch_version=version), facts)


def column(version: str | None) -> tuple[dict[str, str], dict[str, str]]:
    """The versions that took part, and what each run gave."""
    facts: dict[str, str] = {}
    cells = dict.fromkeys((*JOBS, SCRIPT), "")
    for runs in (estimates, script):
        try:
            cells.update(runs(version, facts))
        except TonnageError as error:
            cells.update({name: text or str(error) for name, text in cells.items()})
    return facts, cells


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("versions", nargs="*", help="of torch, such as 2.8.0; without any the installed one")
    wanted = parser.parse_args().versions
    print(f"| torch | CUDA | Python | transformers | {' | '.join((*JOBS, SCRIPT))} |")
    print("|---" * (len(JOBS) + 5) + "|")
    for version in wanted or [None]:
        facts, cells = column(version)
        torch = facts.get("torch", version or "").split("+")[0]
        known = [torch, *(facts.get(name, "") for name in ("cuda", "python", "transformers"))]
        print(f"| {' | '.join([*known, *cells.values()])} |", flush=True)


if __name__ == "__main__":
    main()
