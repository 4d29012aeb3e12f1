"""Makes src/tonnage/meta/meta.json: what only CUDA's kernels know, as a ghost tells it.

    python benchmarks/portable

Runs `probes.py` on a ghost of each kind of card, and fits how many bytes of the blocks inside an operation each of
its numbers (`tonnage.meta.quantities`) stands for: the fewest numbers that explain all probes are taken.  What
does not fit is said, with the largest error.  autocast's lists are those of the header in torch's own wheel.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tonnage.catalog.devices import find_device

CARDS = ("t4", "a100-80gb", "rtx-4090", "h100-80gb", "b200", "rtx-5090")
"""One of each compute capability whose kernels differ."""
TARGET = Path(__file__).parents[2] / "src" / "tonnage" / "meta" / "meta.json"
EXACT = 1e-9
MOST_NUMBERS = 4
STEPS = 64
"""Weights are multiples of a 64th of a byte."""
LISTS = ("LOWER_PRECISION_FP", "FP32", "FP32_SET_OPT_DTYPE", "PROMOTE")

Row = dict[str, Any]


def probed(card: str) -> list[Row]:
    """What the probes saw on a ghost of this card."""
    script = Path(__file__).with_name("probes.py")
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "rows.json"
        command = ["tonnage", "dry-run", "--gpu", card, "--gpu-memory", "4TiB", "--"]
        subprocess.run([*command, sys.executable, str(script), str(found)], check=True, capture_output=True)
        rows: list[Row] = json.loads(found.read_text())
    return rows


def fitted(rows: list[Row]) -> tuple[list[dict[str, float]], float]:
    """For each block of the calls, bytes by number; and the largest relative error.

    Calls with different counts of blocks are fitted as if each had one block, as large as all of its together.
    """
    counts = {len(row["blocks"]) for row in rows}
    blocks = [row["blocks"] if len(counts) == 1 else [sum(row["blocks"])] for row in rows]
    numbers = [row["numbers"] for row in rows]
    fits = [_fewest(numbers, [each[place] for each in blocks]) for place in range(len(blocks[0]))]
    return [fit for fit, _ in fits], max((error for _, error in fits), default=0.0)


def _fewest(numbers: list[dict[str, int]], sizes: list[int]) -> tuple[dict[str, float], float]:
    """What explains all sizes exactly with the fewest numbers; else what comes closest, with few."""
    target = np.array(sizes, dtype=float).clip(1)
    names = [name for name in numbers[0] if any(row[name] for row in numbers)]
    best: tuple[dict[str, float], float] = ({}, 1.0)
    for count in range(1, min(MOST_NUMBERS, len(names)) + 1):
        fits = [_fit(chosen, numbers, target) for chosen in combinations(names, count)]
        fit = min((fit for fit in fits if all(weight > 0 for weight in fit[0].values())), key=_error, default=best)
        if fit[1] <= EXACT:
            return fit
        if fit[1] < best[1] / 2:  # another number has to be worth it
            best = fit
    return best


def _fit(chosen: tuple[str, ...], numbers: list[dict[str, int]], target: Any) -> tuple[dict[str, float], float]:
    matrix = np.array([[row[name] for name in chosen] for row in numbers], dtype=float)
    weights = np.linalg.lstsq(matrix / target[:, None], np.ones_like(target), rcond=None)[0]
    weights = np.round(weights * STEPS) / STEPS
    error = float(np.max(np.abs(matrix @ weights / target - 1)))
    return {name: float(weight) for name, weight in zip(chosen, weights, strict=True)}, error


def _error(fit: tuple[dict[str, float], float]) -> float:
    return fit[1]


def autocast() -> dict[str, list[str]]:
    """torch's lists of operations, from the header that comes with it."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = header.read_text()
    found = {}
    for name in LISTS:
        body = re.search(rf"#define AT_FORALL_{name}\(_\)(.*?)\n\n", text, re.DOTALL)
        assert body is not None
        found[name.lower()] = [
            ".".join(filter(None, each)) for each in re.findall(r"_\((\w+)(?:, (\w+))?\)", body[1])
        ]
    return found


def main() -> None:
    """Run the probes and write the table."""
    table: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for card in CARDS:
        by_kernel = defaultdict(list)
        for row in probed(card):
            by_kernel[row["op"], row["variant"]].append(row)
        for (op, variant), rows in by_kernel.items():
            blocks, error = fitted(rows)
            known = table[op][variant]
            if not known or known[-1]["blocks"] != blocks:
                known.append({"capability": list(find_device(card).capability), "blocks": blocks})
                sys.stdout.write(f"{card:10} {op} {variant!r}: {len(rows)} calls, {blocks}, off by {error:.2%}\n")
    document = {"torch": torch.__version__.split("+")[0], "autocast": autocast(), "inside": table}
    TARGET.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
