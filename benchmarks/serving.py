"""Start-up logs of inference engines beside the closed form, and the numbers of docs/reference/serving.md.

    python -m benchmarks.serving            # prints the tables of the page
    python -m benchmarks.serving --write    # writes them into it
    python -m benchmarks.serving --rows     # each row with every figure

A row is predicted with the settings that its log states and the engine's defaults.  Rows from which a constant was
taken (`learned`) are left out of the medians.
"""

import argparse
import statistics
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from tonnage.catalog.devices import parse_cluster
from tonnage.errors import CannotEstimate, UsageError
from tonnage.model import ModelRef
from tonnage.serving.closed_form import ServingEstimate, estimate_serving
from tonnage.serving.network import ServedNetwork, make_network, read_network
from tonnage.serving.settings import ServeSettings
from tonnage.units import GIB

ROWS: Final = Path(__file__).with_name("serving_rows.toml")
PAGE: Final = Path(__file__).parents[1] / "docs" / "reference" / "serving.md"
BEGIN, END = "<!-- python -m benchmarks.serving --write -->", "<!-- end -->"

PLANNER: Final = {"kv": 6.62, "activation": 195.12, "weights": 0.89, "concurrency": 15.34}
"""Mean absolute errors in percent that llm-d planner reports of itself over 53 runs of vLLM 0.19.0, which are most of
these logs (github.com/llm-d-incubation/llm-d-planner, accuracy/accuracy_report.md)."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One row with its prediction."""

    row: dict[str, Any]
    estimate: ServingEstimate | None
    """None where the settings are refused."""
    refusal: str = ""

    @property
    def starts(self) -> bool:
        """Return the predicted verdict; refused settings do not start."""
        return self.estimate is not None and self.estimate.starts

    def predicted(self, figure: str) -> float | None:
        """Return the prediction of a figure of the row, in its unit."""
        if self.estimate is None:
            return None
        serving, worst = self.estimate.serving, self.estimate.worst
        first_stage_only = self.row.get("pp", 1) > 1 and figure in ("kv_gib", "activation_gib", "weights_gib")
        if first_stage_only:
            return None  # logs show the first stage, the answer is the worst
        values: dict[str, float | None] = {
            "weights_gib": worst.weights_bytes / GIB,
            "activation_gib": worst.profile.bytes / GIB,
            "outside_gib": worst.outside.bytes / GIB,
            "graphs_gib": worst.graphs.bytes / GIB,
            "kv_gib": worst.pool_bytes / GIB,
            "kv_tokens": serving.kv_cache_tokens,
            "concurrency": serving.concurrency,
            "needed_gib": self.estimate.request_bytes / GIB,
        }
        return values[figure]

    def error(self, figure: str) -> float | None:
        """Return the relative error of a figure; None where the row or the prediction has none."""
        measured, predicted = self.row.get(figure), self.predicted(figure)
        return None if not measured or predicted is None else predicted / measured - 1

    def difference(self, figure: str) -> float | None:
        """Return predicted less measured; None where the row or the prediction has none."""
        measured, predicted = self.row.get(figure), self.predicted(figure)
        return None if measured is None or predicted is None else predicted - measured


@cache
def tables() -> dict[str, Any]:
    """Return the file of rows."""
    return tomllib.loads(ROWS.read_text(encoding="utf-8"))


def network(name: str) -> ServedNetwork:
    """Return a network of the catalog, or of the file's own configurations."""
    config = tables()["configs"].get(name)
    if config is None:
        return read_network(name, offline=True)
    return make_network(ModelRef(name=name, kind="config", config=config), name)


def settings(row: dict[str, Any]) -> ServeSettings:
    """Return the settings that a row states."""
    names = ("tp", "pp", "dp", "ep", "max_len", "max_seqs", "max_batched_tokens", "quantization", "kv_dtype")
    stated = {name: row[name] for name in (*names, "block_tokens") if name in row}
    return ServeSettings(engine=f"vllm@{row['version']}", gpu_memory_utilization=row.get("utilization"), **stated)


def compare(row: dict[str, Any]) -> Compared:
    """Return a row with its prediction."""
    wanted = settings(row)
    gpus = wanted.tp * wanted.pp * wanted.dp
    cluster = parse_cluster(row["gpu"] if "x" in row["gpu"][:2] or gpus == 1 else f"{gpus}x{row['gpu']}")
    try:
        return Compared(row=row, estimate=estimate_serving(network(row["model"]), wanted, cluster))
    except (UsageError, CannotEstimate) as error:
        return Compared(row=row, estimate=None, refusal=str(error))


def compare_all() -> list[Compared]:
    """Return all rows with their predictions."""
    return [compare(row) for row in tables()["row"]]


def judged(rows: Iterable[Compared]) -> list[Compared]:
    """Return the rows from which nothing was taken."""
    return [item for item in rows if not item.row.get("learned")]


def _known(values: Iterable[float | None]) -> list[float]:
    return [abs(value) for value in values if value is not None]


def _percentile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def summary(rows: Sequence[Compared]) -> str:
    """Return the table of errors over the rows from which nothing was taken."""
    apart = judged(rows)
    lines = [
        "| figure | rows | median error | 90th percentile | worst | llm-d planner's mean, by its own report |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    percents = (
        ("KV cache pool", "kv_gib", "kv"),
        ("KV cache tokens", "kv_tokens", None),
        ("requests of the maximal length", "concurrency", "concurrency"),
        ("weights", "weights_gib", "weights"),
    )
    for name, figure, theirs in percents:
        errors = _known(item.error(figure) for item in apart if item.row["starts"])
        other = f"{PLANNER[theirs]:.1f} %" if theirs else ""
        lines.append(
            f"| {name} | {len(errors)} | {statistics.median(errors):.2%} | {_percentile(errors, 0.9):.2%} | "
            f"{max(errors):.2%} | {other} |".replace("%", " %")
        )
    for name, figure, theirs in (
        ("a step's peak", "activation_gib", "activation"),
        ("CUDA graphs", "graphs_gib", None),
    ):
        apart_gib = _known(item.difference(figure) for item in apart)
        other = f"{PLANNER[theirs]:.0f} %" if theirs else ""
        lines.append(
            f"| {name} | {len(apart_gib)} | {statistics.median(apart_gib):.3f} GiB | "
            f"{_percentile(apart_gib, 0.9):.3f} GiB | {max(apart_gib):.3f} GiB | {other} |"
        )
    right = [item for item in apart if item.starts == item.row["starts"]]
    close = _known(item.difference("activation_gib") for item in apart)
    lines += [
        "",
        f"Starts or does not start: right in {len(right)} of {len(apart)} rows; {len(rows) - len(apart)} more gave "
        f"constants. A step's peak is within 0.02 GiB in {sum(gib <= 0.02 for gib in close)} of {len(close)}.",
    ]
    return "\n".join(lines)


def row_table(rows: Sequence[Compared], *, only_wrong: bool) -> str:
    """Return a table of rows: measured and predicted; `only_wrong`: those that are off."""
    lines = [
        "| log | vLLM | weights | step's peak | KV cache | tokens | starts |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for item in rows:
        off = abs(item.error("kv_gib") or 0) > 0.005 or abs(item.difference("activation_gib") or 0) > 0.02
        if only_wrong and not off and item.starts == item.row["starts"]:
            continue
        cells = [_pair(item, figure, "{:.2f}") for figure in ("weights_gib", "activation_gib", "kv_gib")]
        cells.append(_pair(item, "kv_tokens", "{:,.0f}"))
        verdict = {True: "yes", False: "no"}
        starts = f"{verdict[item.starts]} / {verdict[item.row['starts']]}"
        mark = " *" if item.row.get("learned") else ""
        lines.append(f"| {item.row['name']}{mark} | {item.row['version']} | {' | '.join(cells)} | {starts} |")
    return "\n".join(lines)


def _pair(item: Compared, figure: str, style: str) -> str:
    """Return predicted / measured."""
    measured, predicted = item.row.get(figure), item.predicted(figure)
    return " / ".join("-" if value is None else style.format(value) for value in (predicted, measured))


def main(arguments: Sequence[str]) -> int:
    """Print the tables, or write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/reference/serving.md")
    parser.add_argument("--rows", action="store_true", help="print each row")
    options = parser.parse_args(arguments)
    rows = compare_all()
    if options.rows:
        print(row_table(rows, only_wrong=False))
        return 0
    text = "\n\n".join(part(rows) for part in PARTS)
    if not options.write:
        print(text)
        return 0
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")
    return 0


PARTS: Final[tuple[Callable[[Sequence[Compared]], str], ...]] = (summary,)
"""Sections of the page, in their order."""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
