"""Budgets of activations beside what is held under them, and beside torch's fractions: writes
docs/explanation/checkpointing.md.

python benchmarks/budget.py > docs/explanation/checkpointing.md
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from asking import ENOUGH_BYTES, most, table
from budget_network import SEQUENCES, TOKENS

from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.errors import CannotEstimate
from tonnage.estimates.from_traces import Run
from tonnage.estimates.predict import estimate
from tonnage.script.dry_run import run as dry_run
from tonnage.trainers.cases import request
from tonnage.units import GIB, MIB, parse_bytes
from tonnage.workers.worker import Worker

HERE = Path(__file__).parent
TEXT = HERE / "budget.md"
GPU = "h100-80gb"
SHARES = (0.1, 0.25, 0.5, 0.75)
"""Of the way from the least that can be held to the most."""

MODELS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama-3.2-1b", {"seq_len": 4096}),
    ("qwen3-4b", {"seq_len": 4096, "precision": "bf16-true"}),
    ("llama-3.1-8b", {"seq_len": 8192, "method": "lora"}),
    ("gpt2-medium", {"seq_len": 1024, "micro_batch": 8}),
)

SENT = MODELS[2]
"""The model of which a part of what is kept is sent to the host."""

FRACTIONS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)


def answer(worker: Worker, model: str, options: dict[str, Any], checkpointing: str) -> Run:
    """Two steps on a card where everything fits, with segments that leave nothing behind a block."""
    job, plan = request(model, offline=True, allocator="expandable", checkpointing=checkpointing, **options)
    cluster = parse_cluster(GPU)
    roomy = replace(cluster, device=cluster.device.with_capacity(ENOUGH_BYTES // 8))
    return estimate(Case(job, plan, roomy), worker=worker, steps=2)


def rows(worker: Worker, model: str, options: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """A line for each way of one model: what it holds, what runs again, how long a step takes."""
    plain = {way: answer(worker, model, options, way) for way in ("none", "selective", "full")}
    held = {way: most(found, "activation") for way, found in plain.items()}
    name = f"{model}, {options.get('method', 'full')}, {options.get('micro_batch', 1)} x {options['seq_len']:,}"
    yield (name, "", *_held(held["full"], "full"), "100", "100", _step(plain["full"]))
    for share in SHARES:
        budget = int(held["full"] + share * (held["none"] - held["full"]))
        found = answer(worker, model, options, f"budget={budget}")
        again = found.estimate.model["run_again"]
        used = most(found, "activation")
        assert used <= budget, f"{model}: {used} bytes are held under a budget of {budget}"
        yield (
            "",
            f"{budget / GIB:.2f}",
            f"{used / GIB:.2f}",
            f"{100 * (budget - used) / budget:.2f}",
            f"{100 * again['flops'] / again['full_flops']:.0f}",
            f"{100 * again['seconds_fraction']:.0f}",
            _step(found),
        )
    yield ("", "", *_held(held["selective"], "selective"), "", "", _step(plain["selective"]))
    yield ("", "", *_held(held["none"], "none"), "0", "0", _step(plain["none"]))


def _held(count_bytes: int, way: str) -> tuple[str, str]:
    return f"{count_bytes / GIB:.2f}", way


def _step(found: Run) -> str:
    seconds = found.estimate.time["step_seconds"]
    return "" if seconds is None else f"{seconds:.3f}"


def ours(worker: Worker) -> str:
    headings = (
        *("", "budget GiB", "held GiB", "below the budget, %", "FLOPs again, %", "seconds again, %", "step s"),
    )
    return table(headings, [row for model, options in MODELS for row in rows(worker, model, options)])


def sent(worker: Worker) -> str:
    """One model with and without a part of what is kept on the host."""
    model, options = SENT
    lines = []
    for budget in ("12GiB", "20GiB", "32GiB"):
        for offload in ("none", "cpu-streamed"):
            found = answer(worker, model, {**options, "activation_offload": offload}, f"budget={budget}")
            again, used = found.estimate.model["run_again"], most(found, "activation")
            assert used <= parse_bytes(budget), f"{model}: {used} bytes are held under a budget of {budget}"
            lines.append(
                (
                    budget,
                    offload,
                    f"{used / GIB:.2f}",
                    f"{again['sent_bytes'] / GIB:.2f}",
                    f"{100 * again['seconds_fraction']:.0f}",
                    _step(found),
                )
            )
    headings = ("budget", "activation offload", "held GiB", "on the host GiB", "seconds again, %", "step s")
    return table(headings, lines)


def torchs(worker: Worker) -> dict[str, str]:
    """Most bytes besides weights, gradients and states, by torch's fraction and by as large a part in bytes."""
    options = {"seq_len": TOKENS, "micro_batch": SEQUENCES, "precision": "bf16-true", "optimizer": "adamw-fused"}
    name = "budget_network:make"
    whole = most(answer(worker, name, options, "none"), "activation")
    lines, peaks = [], []
    for fraction in FRACTIONS:
        command = [sys.executable, str(HERE / "budget_network.py"), str(fraction)]
        compiled = dry_run(command, parse_cluster(GPU), steps=2)
        peaks.append(most(compiled, "activation", "workspace"))
        budget = int(fraction * whole)
        try:
            budgeted = answer(worker, name, options, f"budget={budget}")
        except CannotEstimate:  # less than with every layer checkpointed
            budgeted = None
        lines.append(
            (
                f"{fraction:.2f}",
                f"{peaks[-1] / MIB:.0f}",
                f"{budget / MIB:.0f}",
                f"{most(budgeted, 'activation') / MIB:.0f}" if budgeted else "refused",
                f"{most(budgeted, 'activation', 'workspace') / MIB:.0f}" if budgeted else "",
            )
        )
    headings = ("fraction", "torch: peak MiB", "budget MiB", "activations held MiB", "peak MiB")
    falls = [
        f"{high / MIB:.0f} MiB at {less}, {low / MIB:.0f} at {more}"
        for (less, high), (more, low) in pairwise(zip(FRACTIONS, peaks, strict=True))
        if low < high
    ]
    said = f"Nor does it grow with the fraction: {'; '.join(falls)}." if falls else "Here it grows with the fraction."
    return {"torchs": table(headings, lines), "whole": f"{whole / MIB:,.0f}", "monotonic": said}


def main() -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    with Worker() as worker:
        found = {"ours": ours(worker), "sent": sent(worker), **torchs(worker)}
        print(TEXT.read_text(encoding="utf-8").format(**found), end="")


if __name__ == "__main__":
    main()
