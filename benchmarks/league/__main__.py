"""Memory estimators in a row: the same jobs through tonnage and through what else can be installed.

    python benchmarks/league [full|lora] [--tool NAME ...] [--model NAME ...] [--patience SECONDS]

`full`: full fine-tuning in pure bf16 with AdamW, one sequence of 4,096 tokens, on one imaginary 8-TiB card, so that
every tool has something to say; nobody measured it.  `lora`: the published T4 runs of measurements/published,
with what was measured beside.  Each tool runs in a process and an environment of its own, made on first use below
~/.cache/tonnage/league (TONNAGE_CACHE); seconds are those after its imports.  A tool that cannot say a row's job, or
cannot be installed, gets a line with the reason.
"""

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

from environments import prepare
from rows import full, lora
from tools import TOOLS, Tool


def ask(tool: Tool, row: dict[str, Any], patience_seconds: float) -> dict[str, Any]:
    """The tool's answer, or `cannot` with the reason."""
    if row["method"] not in tool.methods:
        return {"cannot": tool.otherwise}
    variables = prepare(tool)
    if isinstance(variables, str):
        return {"cannot": variables}
    command = [sys.executable, str(tool.script), json.dumps(row)]
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=patience_seconds)
    except subprocess.TimeoutExpired:
        return {"cannot": f"stopped after {patience_seconds:.0f} s"}
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {"cannot": f"failed: {lines[-1][:160]}" if lines else f"failed with exit code {done.returncode}"}
    answer = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(answer, dict)
    return answer


def line(row: dict[str, Any], tool: Tool, answer: dict[str, Any]) -> str:
    """One row of the table."""
    job = f"{row['model']}, {row['micro_batch']} x {row['seq_len']:,}"
    if "attention" in row:
        job += f", {row['attention']}"
    measured = row.get("allocated_gib")
    shown = f"{measured:.4f}" if measured else "-"
    if "cannot" in answer:
        return f"| {job} | {tool.name} | {shown} | - | - | - | - | {answer['cannot']} |"
    off = f"{100 * (answer['gib'] / measured - 1):+.2f} %" if measured else "-"
    numbers = f"{answer['gib']:.4f} | {off} | {answer['seconds']:.2f} | {answer['own_gib']:.2f}"
    return f"| {job} | {tool.name} | {shown} | {numbers} | {answer['means']} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=("full", "lora"), default="full")
    parser.add_argument("--tool", action="append", choices=[tool.name for tool in TOOLS])
    parser.add_argument("--model", action="append")
    parser.add_argument("--patience", type=float, default=3600.0, metavar="SECONDS")
    options = parser.parse_args()
    rows = full() if options.kind == "full" else lora()
    errors: dict[str, list[float]] = {}
    print("| job | tool | measured GiB | GiB | off by | seconds | tool's own RAM, GiB | what the number is |")
    print("|---|---|---:|---:|---:|---:|---:|---|")
    for row in rows:
        if options.model and row["model"] not in options.model:
            continue
        for tool in TOOLS:
            if options.tool and tool.name not in options.tool:
                continue
            answer = ask(tool, row, options.patience)
            print(line(row, tool, answer), flush=True)
            if "gib" in answer and "allocated_gib" in row:
                errors.setdefault(tool.name, []).append(100 * abs(answer["gib"] / row["allocated_gib"] - 1))
    for name, found in errors.items():
        print(f"\n{name}: median {statistics.median(found):.2f} %, worst {max(found):.2f} % of {len(found)}")


if __name__ == "__main__":
    main()
