"""examples/lora.py and examples/qlora.py, dry-run unchanged on a ghost T4, beside what others measured on a real one.

    python benchmarks/t4.py [--torch VERSION] [--method lora|qlora] [--estimate]

The measured runs are in measurements/published/fitcheck-t4.jsonl, each with its source.  The scripts are ours;
they take the same steps (adapters of rank 32 or 16 on the attention projections, in fp32 beside a base in fp16 or in
NF4 whose other weights are fp32, checkpointing, AdamW).  With `--estimate` no script runs: `tonnage estimate` is told
the same.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import tonnage
from tonnage.catalog.devices import parse_cluster
from tonnage.job import Method
from tonnage.script.dry_run import run
from tonnage.units import GIB

ROOT = Path(__file__).parents[1]
METHODS = ("lora", "qlora")


def model_folder(name: str, parent: Path) -> Path:
    """A folder with the model's config.json, as a download without weights would be."""
    folder = parent / name
    folder.mkdir(exist_ok=True)
    shutil.copy(str(files("tonnage") / "catalog" / "configs" / f"{name}.json"), folder / "config.json")
    return folder


def method(row: dict[str, Any]) -> Method:
    """`lora` or `qlora`."""
    return "qlora" if row["arguments"]["quantized"] else "lora"


def measured(methods: tuple[str, ...]) -> list[dict[str, Any]]:
    """The published runs of these methods."""
    lines = (ROOT / "measurements" / "published" / "fitcheck-t4.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if method(row) in methods]


def estimated(row: dict[str, Any], worker: tonnage.Worker) -> tuple[float, float]:
    """GiB allocated and reserved, as an estimate by the model's name says."""
    asked = row["arguments"]
    peak = tonnage.estimate(
        asked["model"],
        gpu=row["gpu"],
        method=method(row),
        precision="fp16-true",
        lora_rank=asked["lora_rank"],
        lora_targets=("q_proj", "k_proj", "v_proj", "o_proj"),
        quant="nf4-double" if asked.get("double_quant") else "nf4",
        checkpointing="full",
        attention="eager" if asked["attention"] == "eager" else "efficient",
        outputs="step",
        micro_batch=asked["micro_batch"],
        seq_len=asked["seq_len"],
        worker=worker,
    ).peak
    return peak.allocated_bytes / GIB, peak.reserved_bytes / GIB


def dry_run(row: dict[str, Any], parent: Path, torch_version: str | None) -> tuple[float, float]:
    """GiB allocated and reserved, as the dry-run of the script says."""
    script, asked = ROOT / "examples" / f"{method(row)}.py", row["arguments"]
    command = [sys.executable, str(script), str(model_folder(asked["model"], parent))]
    command += ["--attention", asked["attention"], "--rank", str(asked["lora_rank"])]
    command += ["--seq-len", str(asked["seq_len"]), "--micro-batch", str(asked["micro_batch"])]
    command += ["--double"] if asked.get("double_quant") else []
    peak = run(command, parse_cluster(row["gpu"]), steps=4, torch_version=torch_version).estimate.peak
    return peak.allocated_bytes / GIB, peak.reserved_bytes / GIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", help="version of torch on the ghost; default: the installed one")
    parser.add_argument("--method", choices=METHODS, help="only these runs; default: both methods")
    parser.add_argument("--estimate", action="store_true", help="by `tonnage estimate` in place of the scripts")
    options = parser.parse_args()
    rows = measured((options.method,) if options.method else METHODS)
    print("| method | model | attention | tokens ", end="")
    print("| allocated measured | predicted | % | reserved measured | predicted | % |")
    print("|---|---|---|---|---:|---:|---:|---:|---:|---:|")
    errors: dict[str, list[float]] = {"allocated": [], "reserved": [], "reserved, sdpa": []}
    with tempfile.TemporaryDirectory() as folder, tonnage.Worker(options.torch) as worker:
        for row in rows:
            if options.estimate:
                allocated, reserved = estimated(row, worker)
            else:
                allocated, reserved = dry_run(row, Path(folder), options.torch)
            known, asked = row["measured"], row["arguments"]
            of_allocated = 100 * (allocated / known["allocated"] - 1)
            of_reserved = 100 * (reserved / known["reserved"] - 1)
            errors["allocated"].append(abs(of_allocated))
            errors["reserved"].append(abs(of_reserved))
            if asked["attention"] == "sdpa":
                errors["reserved, sdpa"].append(abs(of_reserved))
            print(
                f"| {method(row)} | {asked['model']} | {asked['attention']} "
                f"| {asked['micro_batch']} x {asked['seq_len']} "
                f"| {known['allocated']:.4f} | {allocated:.4f} | {of_allocated:+.2f} "
                f"| {known['reserved']:.4f} | {reserved:.4f} | {of_reserved:+.2f} |",
                flush=True,
            )
    for name, found in errors.items():
        print(
            f"\n{name}: median {statistics.median(found):.2f} %, worst {max(found):.2f} % of {len(found)} runs",
            end="",
        )
    print()


if __name__ == "__main__":
    main()
