"""examples/lora.py and examples/qlora.py, dry-run unchanged on a ghost T4, beside what others measured on a real one.

    python benchmarks/t4.py [--torch VERSION] [--method lora|qlora]

The measured runs are in measurements/t4-lora.jsonl and t4-qlora.jsonl, each with its source.  The scripts are ours;
they take the same steps (adapters of rank 32 or 16 on the attention projections, in fp32 beside a base in fp16 or in
NF4 whose other weights are fp32, checkpointing, AdamW).
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

from tonnage.device import parse_cluster
from tonnage.dryrun import run
from tonnage.units import GIB

ROOT = Path(__file__).parents[1]
METHODS = ("lora", "qlora")


def model_folder(name: str, parent: Path) -> Path:
    """A folder with the model's config.json, as a download without weights would be."""
    folder = parent / name
    folder.mkdir(exist_ok=True)
    shutil.copy(str(files("tonnage") / "catalog" / "models" / f"{name}.json"), folder / "config.json")
    return folder


def measured(methods: tuple[str, ...]) -> list[dict[str, Any]]:
    """The published runs of these methods."""
    lines = [line for name in methods for line in (ROOT / "measurements" / f"t4-{name}.jsonl").open()]
    return [json.loads(line) for line in lines]


def predicted(row: dict[str, Any], parent: Path, torch_version: str | None) -> tuple[float, float]:
    """GiB allocated and reserved, as the dry-run says."""
    script = ROOT / "examples" / f"{row.get('method', 'lora')}.py"
    command = [sys.executable, str(script), str(model_folder(row["model"], parent))]
    command += ["--attention", row["attention"], "--rank", str(row["lora_rank"])]
    command += ["--seq-len", str(row["seq_len"]), "--micro-batch", str(row["micro_batch"])]
    peak = run(command, parse_cluster(row["gpu"]), steps=4, torch_version=torch_version).estimate.peak
    return peak.allocated_bytes / GIB, peak.reserved_bytes / GIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", help="version of torch on the ghost; default: the installed one")
    parser.add_argument("--method", choices=METHODS, help="only these runs; default: both methods")
    options = parser.parse_args()
    rows = measured((options.method,) if options.method else METHODS)
    print("| method | model | attention | tokens ", end="")
    print("| allocated measured | predicted | % | reserved measured | predicted | % |")
    print("|---|---|---|---|---:|---:|---:|---:|---:|---:|")
    errors: dict[str, list[float]] = {"allocated": [], "reserved": [], "reserved, sdpa": []}
    with tempfile.TemporaryDirectory() as folder:
        for row in rows:
            allocated, reserved = predicted(row, Path(folder), options.torch)
            of_allocated = 100 * (allocated / row["allocated_gib"] - 1)
            of_reserved = 100 * (reserved / row["reserved_gib"] - 1)
            errors["allocated"].append(abs(of_allocated))
            errors["reserved"].append(abs(of_reserved))
            if row["attention"] == "sdpa":
                errors["reserved, sdpa"].append(abs(of_reserved))
            print(
                f"| {row.get('method', 'lora')} | {row['model']} | {row['attention']} "
                f"| {row['micro_batch']} x {row['seq_len']} "
                f"| {row['allocated_gib']:.4f} | {allocated:.4f} | {of_allocated:+.2f} "
                f"| {row['reserved_gib']:.4f} | {reserved:.4f} | {of_reserved:+.2f} |",
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
