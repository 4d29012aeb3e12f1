"""Runs the same jobs with several versions of torch and prints a table of what came out, for
docs/reference/versions.md.

    python benchmarks/versions.py 2.8.0 2.13.0 ...                 without versions: the installed torch
    python benchmarks/versions.py --techniques 2.8.0 2.13.0 ...    rows are techniques, columns versions

A cell is the allocated and reserved peak in MiB, when torch's own counters say the same as the walk through its
allocator's events, and no function of NVIDIA's was called that the ghost does not have; else what went wrong.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tonnage
from tonnage.case import Case
from tonnage.catalog import configurations
from tonnage.catalog.devices import parse_cluster
from tonnage.errors import TonnageError
from tonnage.estimates import predict
from tonnage.estimates.from_traces import Run
from tonnage.estimates.timeline import timeline
from tonnage.job import Job
from tonnage.plans import Plan
from tonnage.script import dry_run
from tonnage.shallow.depths import with_layers
from tonnage.trainers.cases import request
from tonnage.units import MIB
from tonnage.workers.worker import Worker

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
EXPERTS = "qwen3-30b-a3b"
TECHNIQUES: dict[str, dict[str, Any]] = {
    "zero1": {"shard": "zero1"},
    "zero2, clipped": {"shard": "zero2", "clip_grad_norm": 1},
    "hsdp": {"gpu": "2x4xa100-80gb", "shard": "hsdp"},
    "tp": {"tp": 2},
    "tp, zero3, selective": {"tp": 2, "shard": "zero3", "checkpointing": "selective"},
    "pp": {"pp": 2, "grad_accum": 2},
    "pp interleaved, tp": {"pp": 2, "tp": 2, "pp_schedule": "interleaved", "grad_accum": 2, "layers": 4},
    "cp, zero3": {"cp": 2, "shard": "zero3"},
    "ep, zero3": {"ep": 2, "shard": "zero3", "model": EXPERTS},
    "lora, tp": {"method": "lora", "tp": 2, "checkpointing": "full"},
    "lora, tp, zero3": {"method": "lora", "tp": 2, "shard": "zero3"},
    "lora, pp": {"method": "lora", "pp": 2, "grad_accum": 2},
    "qlora": {"method": "qlora"},
    "budget of 1,100 MiB": {"checkpointing": "budget=1100MiB", "grad_accum": 2},
    "sqrt": {"checkpointing": "sqrt"},
    "activation offload": {"activation_offload": "cpu"},
    "the same, streamed": {"activation_offload": "cpu-streamed"},
    "optimizer offload": {"optimizer_offload": "cpu"},
    "param offload": {"shard": "zero3", "param_offload": "cpu"},
    "optimizer in backward": {"optimizer_in_backward": True},
    "8-bit AdamW": {"optimizer": "adamw-8bit"},
    "adafactor": {"optimizer": "adafactor"},
    "chunked loss": {"loss": "chunked"},
    "fused loss": {"loss": "fused"},
    "megatron-bf16, zero1": {"precision": "megatron-bf16", "shard": "zero1"},
    "evaluation, generation": {"eval_batch": 2, "generate": 8},
    "resumed, saved": {"resume": "cpu", "save_checkpoint": "full"},
}
"""Options of an estimate of two layers, two sequences of 512 tokens, on eight cards unless said otherwise."""


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
        model = configurations.resolve(MODEL)
        for name, (gpu, method, plan) in JOBS.items():
            job = Job(model=model, seq_len=1024).with_method(method)
            cluster = parse_cluster(gpu)
            yield name, cell(lambda: predict.estimate(Case(job, plan, cluster), worker=worker), facts)  # noqa: B023


def script(version: str | None, facts: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The example script on a small model's configuration."""
    with tempfile.TemporaryDirectory() as folder:
        catalog = Path(tonnage.__file__).parent / "catalog" / "configs" / f"{SMALL}.json"
        shutil.copy(catalog, Path(folder) / "config.json")
        command = [sys.executable, str(EXAMPLE), folder]
        yield SCRIPT, cell(lambda: dry_run.run(command, parse_cluster(ONE), torch_version=version), facts)


def techniques(version: str | None) -> Iterator[str]:
    """A cell for each of TECHNIQUES, by one warm worker."""
    with Worker(version) as worker:
        for told in TECHNIQUES.values():
            options = {"seq_len": 512, "micro_batch": 2, **told}
            cluster, layers = parse_cluster(options.pop("gpu", EIGHT)), options.pop("layers", 2)
            asked, plan = request(options.pop("model", MODEL), offline=True, **options)
            job = with_layers(asked, layers)
            yield cell(lambda: predict.estimate(Case(job, plan, cluster), rank=0, worker=worker), {})  # noqa: B023


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
    parser.add_argument("--techniques", action="store_true", help="techniques on few layers, each with all versions")
    asked = parser.parse_args()
    wanted = asked.versions
    if asked.techniques:
        columns = {version or "installed": list(techniques(version)) for version in wanted or [None]}
        print(f"| allocated / reserved, MiB | {' | '.join(columns)} |")
        print("|---" * (len(columns) + 1) + "|")
        for name, *cells in zip(TECHNIQUES, *columns.values(), strict=True):
            print(f"| {name} | {' | '.join(cells)} |")
        return
    print(f"| torch | CUDA | Python | transformers | {' | '.join((*JOBS, SCRIPT))} |")
    print("|---" * (len(JOBS) + 5) + "|")
    for version in wanted or [None]:
        facts, cells = column(version)
        torch = facts.get("torch", version or "").split("+")[0]
        known = [torch, *(facts.get(name, "") for name in ("cuda", "python", "transformers"))]
        print(f"| {' | '.join([*known, *cells.values()])} |", flush=True)


if __name__ == "__main__":
    main()
