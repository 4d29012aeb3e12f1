"""Memory estimators in a row: the same jobs through tonnage and through what else can be installed.

    python benchmarks/league [full|lora|recorded] [--tool NAME ...] [--model NAME ...] [--patience SECONDS]

`full`: full fine-tuning in pure bf16 with AdamW, one sequence of 4,096 tokens, on one imaginary 8-TiB card, so that
every tool has something to say; nobody measured it.  `lora`: the published T4 runs of measurements/published,
with what was measured beside.  `recorded`: steps of our own H100 (measurements/), a line for each with all tools
beside one another; what autocast keeps in fp32, and what is recomputed, is said to each in its own words.

Each tool runs in a process and an environment of its own, made on first use below ~/.cache/tonnage/league
(TONNAGE_CACHE); seconds are those after its imports.  A tool that cannot say a row's job, or cannot be installed,
gets a line with the reason.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from typing import Any

from environments import prepare
from rows import full, lora, recorded
from tools import TOOLS, Tool

ROWS = {"full": full, "lora": lora, "recorded": recorded}


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


def beside(rows: list[dict[str, Any]], tools: list[Tool], patience_seconds: float) -> None:
    """A line for each row, a column for each tool: how far it is off; then what became of each tool."""
    answers: dict[str, list[tuple[dict[str, Any], float]]] = {tool.name: [] for tool in tools}
    print("| job | measured GiB | " + " | ".join(f"{tool.name} %" for tool in tools) + " |")
    print("|---|---:|" + "---:|" * len(tools))
    for row in rows:
        measured, cells = row["allocated_gib"], []
        for tool in tools:
            answer = ask(tool, row, patience_seconds)
            off = 100 * (answer["gib"] / measured - 1) if "gib" in answer else math.nan
            answers[tool.name].append((answer, off))
            cells.append("" if math.isnan(off) else f"{off:+.2f}")
        job = f"{row['model']}, {row['method']}, {row['precision']}"
        job += ", checkpointing" if row["checkpointing"] == "full" else ""
        print(
            f"| {job}, {row['micro_batch']} x {row['seq_len']:,} | {measured:.2f} | {' | '.join(cells)} |", flush=True
        )
    print("\n| tool | answered | median % | worst % | more than 5 % too low | seconds, median | what the number is |")
    print("|---|---:|---:|---:|---:|---:|---|")
    for name, told in answers.items():
        print(summary(name, told))


def summary(name: str, told: list[tuple[dict[str, Any], float]]) -> str:
    """One tool's line: of what it answered, and why it did not answer the rest."""
    off = [percent for _, percent in told if not math.isnan(percent)]
    reasons = sorted({answer["cannot"] for answer, _ in told if "cannot" in answer})
    if not off:
        return f"| {name} | 0 of {len(told)} | | | | | {'; '.join(reasons)} |"
    seconds = statistics.median(answer["seconds"] for answer, _ in told if "gib" in answer)
    means = next(answer["means"] for answer, _ in told if "gib" in answer)
    numbers = f"{statistics.median(map(abs, off)):.2f} | {max(off, key=abs):+.2f} | {sum(one < -5 for one in off)}"
    why = f" (not answered: {'; '.join(reasons)})" if reasons else ""
    return f"| {name} | {len(off)} of {len(told)} | {numbers} | {seconds:.1f} | {means.split(';')[0]}{why} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=tuple(ROWS), default="full")
    parser.add_argument("--tool", action="append", choices=[tool.name for tool in TOOLS])
    parser.add_argument("--model", action="append")
    parser.add_argument("--patience", type=float, default=3600.0, metavar="SECONDS")
    options = parser.parse_args()
    tools = [tool for tool in TOOLS if not options.tool or tool.name in options.tool]
    rows = [row for row in ROWS[options.kind]() if not options.model or row["model"] in options.model]
    if options.kind == "recorded":
        beside(rows, tools, options.patience)
        return
    errors: dict[str, list[float]] = {}
    print("| job | tool | measured GiB | GiB | off by | seconds | tool's own RAM, GiB | what the number is |")
    print("|---|---|---:|---:|---:|---:|---:|---|")
    for row in rows:
        for tool in tools:
            answer = ask(tool, row, options.patience)
            print(line(row, tool, answer), flush=True)
            if "gib" in answer and "allocated_gib" in row:
                errors.setdefault(tool.name, []).append(100 * abs(answer["gib"] / row["allocated_gib"] - 1))
    for name, found in errors.items():
        print(f"\n{name}: median {statistics.median(found):.2f} %, worst {max(found):.2f} % of {len(found)}")


if __name__ == "__main__":
    main()
