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
from tonnage.errors import UsageError
from tonnage.model import ModelRef
from tonnage.serving.blocks import PagedEngine, contiguous, simulate
from tonnage.serving.cache_layers import read_layers
from tonnage.serving.closed_form import ServingEstimate, estimate_serving
from tonnage.serving.kv_cache import Request, lay_out
from tonnage.serving.lengths import Lengths, Requests, parse_lengths
from tonnage.serving.network import ServedNetwork, make_network, read_network
from tonnage.serving.quantization import find_quantization
from tonnage.serving.settings import ServeSettings
from tonnage.serving.speed import INTERVAL, serving_speed
from tonnage.serving.weights import list_weights
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
    stated = {name: row[name] for name in (*names, "block_tokens", "warm") if name in row}
    return ServeSettings(engine=f"vllm@{row['version']}", gpu_memory_utilization=row.get("utilization"), **stated)


def compare(row: dict[str, Any]) -> Compared:
    """Return a row with its prediction."""
    wanted = settings(row)
    gpus = wanted.tp * wanted.pp * wanted.dp
    cluster = parse_cluster(row["gpu"] if "x" in row["gpu"][:2] or gpus == 1 else f"{gpus}x{row['gpu']}")
    try:
        return Compared(row=row, estimate=estimate_serving(network(row["model"]), wanted, cluster))
    except UsageError:
        return Compared(row=row, estimate=None)


def compare_all() -> list[Compared]:
    """Return all rows with their predictions."""
    return [compare(row) for row in tables()["row"]]


def judged(rows: Iterable[Compared]) -> list[Compared]:
    """Return the rows from which nothing was taken."""
    return [item for item in rows if not item.row.get("learned")]


def _known(values: Iterable[float | None]) -> list[float]:
    return [abs(value) for value in values if value is not None]


def _percent(part: float) -> str:
    return f"{100 * part:.2f} %"


def _percentile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def summary(rows: Sequence[Compared]) -> str:
    """Return the table of errors over the rows from which nothing was taken."""
    apart = judged(rows)
    lines = [
        "| figure | rows | median error | mean | 90th percentile | worst | llm-d planner's mean, by its own report |",
        "|---|---:|---:|---:|---:|---:|---:|",
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
            f"| {name} | {len(errors)} | {_percent(statistics.median(errors))} | "
            f"{_percent(statistics.mean(errors))} | {_percent(_percentile(errors, 0.9))} | "
            f"{_percent(max(errors))} | {other} |"
        )
    for name, figure, theirs in (
        ("a step's peak", "activation_gib", "activation"),
        ("CUDA graphs", "graphs_gib", None),
    ):
        apart_gib = _known(item.difference(figure) for item in apart)
        other = f"{PLANNER[theirs]:.0f} %" if theirs else ""
        lines.append(
            f"| {name} | {len(apart_gib)} | {statistics.median(apart_gib):.3f} GiB | "
            f"{statistics.mean(apart_gib):.3f} GiB | "
            f"{_percentile(apart_gib, 0.9):.3f} GiB | {max(apart_gib):.3f} GiB | {other} |"
        )
    right = [item for item in apart if item.starts == item.row["starts"]]
    close = _known(item.difference("activation_gib") for item in apart)
    others = _known(
        item.error("kv_gib") for item in apart if item.row["starts"] and not item.row["gpu"].startswith("h100")
    )
    lines += [
        "",
        f"Starts or does not start: right in {len(right)} of {len(apart)} rows. A step's peak is within 0.02 GiB "
        f"in {sum(gib <= 0.02 for gib in close)} of {len(close)}. {len(rows) - len(apart)} more rows gave constants. "
        "The form of the terms was found with the logs of H100s up to 0.19.0 at hand. The others were looked for "
        "afterwards; they gave the term for compiling and the graphs of other cards than H100s. Of those that gave "
        f"nothing, {len(others)} are of other cards: median error of the pool {_percent(statistics.median(others))}, "
        f"worst {_percent(max(others))}. "
        "Nothing was taken from the seven rows of Granite Vision, Kimi-VL, Llama 4 and Mistral Small, which were "
        "predicted last. The planner's rows are most of the logs of 0.19.0.",
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


def wrong_rows(rows: Sequence[Compared]) -> str:
    """Return the rows that are off, with what is known about it."""
    return (
        "Rows that are more than 0.5 % or 0.02 GiB off, or whose verdict is wrong (predicted / measured, GiB; * gave "
        "a constant):\n\n" + row_table(rows, only_wrong=True)
    )


def rules_of_thumb(rows: Sequence[Compared]) -> str:
    """Return what rules of thumb say beside what is computed."""
    llama2, llama3 = network("llama-2-7b"), network("llama-3-8b")
    old, new = (read_layers(item.config, element_bytes=2) for item in (llama2, llama3))
    old_bytes, new_bytes = (sum(layer.token_bytes for layer in layers) for layers in (old, new))
    lines = [
        "## Rules of thumb, computed",
        "",
        f"- Llama 2 7B keeps {old_bytes:,} bytes of a token: {old_bytes * 4096 * 32 / 1e9:.1f} GB for 32 requests of "
        f"4,096. Llama 3 8B keeps {new_bytes:,}, {'a quarter' if old_bytes == 4 * new_bytes else 'less'}.",
        "- Pages in 60 GB for Llama 3 8B, and the requests that they hold:",
        "",
        "| tokens of a page | pages | tokens | " + " | ".join(f"requests of {n:,}" for n in _LENGTHS) + " |",
        "|---:" * (3 + len(_LENGTHS)) + "|",
    ]
    for size in (16, 32, 128):
        pool = lay_out(new, size).fill(60 * 10**9)
        fits = (int(pool.concurrency(Request(length=n, batched_tokens=n))) for n in _LENGTHS)
        cells = [f"{pool.blocks:,}", f"{pool.blocks * size:,}", *(f"{fit:,}" for fit in fits)]
        lines.append(f"| {size} | {' | '.join(cells)} |")
    slots = Requests(prompts=_alike(512), outputs=_alike(1), arrivals=_alike(0))
    waste = contiguous(slots, pool_tokens=10**6, max_len=8192).mean_waste
    lines += [
        "",
        f"- A slot of 8,192 tokens wastes {_percent(waste)} on a request of 512; a page of 16 at most 15 tokens.",
        "- Weights of a 7B network, by the rule (bytes times 7 B), and what an engine loads of Llama 2 7B:",
        "",
        "| format | rule | loaded | of it unquantized weights and scales |",
        "|---|---:|---:|---:|",
    ]
    assert llama2.shape is not None
    for name, rule in (
        ("none", 14.0),
        ("fp8", 7.0),
        ("int8", 7.0),
        ("awq-int4", 3.5),
        ("nf4", 3.5),
        ("nf4-double", 3.5),
    ):
        quantization = find_quantization(name)
        weights = list_weights(llama2.shape)
        loaded = sum(weight.bytes(quantization) for weight in weights)
        bare = sum(w.elements * quantization.bits / 8 for w in weights if w.is_quantized(quantization))
        rest = f"{(loaded - bare) / 1e9:.2f} GB" if bare else "-"
        lines.append(f"| {name} | {rule:.1f} GB | {loaded / 1e9:.2f} GB | {rest} |")
    lines += ["", *_beside_the_engine(rows)]
    return "\n".join(lines)


def _beside_the_engine(rows: Sequence[Compared]) -> list[str]:
    """Return where the rule `card - weights` is off, by the logs."""
    lines = [
        "The rule that the card less its weights is left for the KV cache, beside engines:",
        "",
        "| log | card less weights | measured pool | rule / measured |",
        "|---|---:|---:|---:|",
    ]
    for name in ("Qwen3-32B", "Llama-3.1-8B, fp16, 32,768 tokens", "qwen3-30b-a3b, 8,192 tokens", "gpt-oss-120b"):
        item = next(item for item in rows if item.row["name"] == name)
        assert item.estimate is not None
        left = item.estimate.settings.device.capacity_bytes / GIB - item.row["weights_gib"]
        measured = item.row["kv_gib"]
        label = f"{name}, vLLM {item.row['version']}"
        lines.append(f"| {label} | {left:.2f} GiB | {measured:.2f} GiB | {left / measured:.2f} |")
    return lines


def allocation(rows: Sequence[Compared]) -> str:
    """Return paged against contiguous allocation for some distributions of lengths."""
    lines = [
        "## Pages against slots",
        "",
        "Llama 3.1 8B on an H100 (the pool of its log), 20,000 requests that all wait, answers of 256 tokens on "
        "average; slots of 8,192 tokens. The simulator (`serving/blocks.py`) takes the same steps and puts back as "
        "many requests as the scheduler of vLLM 0.33.0 in the twelve cases in which both ran, six with cached "
        "prefixes (`tests/programs/vllm_scheduler.py`); a million requests take it three seconds.",
        "",
        "| prompts | slots | their waste | requests in pages, mean | waste in pages | put back | computed again |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    engine = PagedEngine(
        blocks=29_750, block_tokens=16, max_seqs=1024, batched_tokens=8192, step_seconds=0.02, caches=True
    )
    for text in ("p50=500,p95=500", "p50=800,p95=6000", "p50=3000,p95=7000", "p50=3000,p95=7000,prefix=2000"):
        requests = parse_lengths(text).draw(20_000, most=8192)
        slots = contiguous(requests, pool_tokens=29_750 * 16, max_len=8192)
        paged = simulate(requests, engine)
        lines.append(
            f"| {text} | {slots.slots} | {_percent(slots.mean_waste)} | {paged.mean_running:.0f} | "
            f"{_percent(paged.mean_waste)} | {paged.preemptions:,} | {paged.recomputed_tokens:,} tokens |"
        )
    return "\n".join(lines)


def speeds(rows: Sequence[Compared]) -> str:
    """Return the speed of published servers beside the predicted one."""
    lines = [
        "## Speed",
        "",
        "Steps are priced by the rates of the [time model](time.md): products by arithmetic or by reading their "
        f"weights, keys and values read once. The interval of {INTERVAL[0]} to {INTERVAL[1]} was "
        "assumed before the last three of these were found.",
        "",
        "| server | requests | ms a token: predicted / measured | measured / predicted |",
        "|---|---:|---:|---:|",
    ]
    for row in tables()["speed"]:
        estimate = compare(row).estimate
        assert estimate is not None
        lengths = Lengths(p50=row["prompt"], p95=row["prompt"], output=row["output"])
        predicted = 1000 * serving_speed(estimate, lengths, row["concurrency"]).step_seconds
        measured = row["token_ms"]
        lines.append(
            f"| {row['name']} | {row['concurrency']} | {predicted:.2f} / {measured:.2f} | "
            f"{measured / predicted:.2f} |"
        )
    return "\n".join(lines)


def _alike(value: int) -> Any:
    import numpy as np

    return np.full(1, value)


_RULES: Final = (
    *(("none", 14.0), ("fp8", 7.0), ("int8", 7.0), ("gptq-int4", 3.5), ("awq-int4", 3.5)),
    *(("nf4", 3.5), ("nf4-double", 3.5), ("nvfp4", 3.5)),
)
"""Formats, and the GB of 7 billion weights by the rule of bits."""

_LENGTHS: Final = (256, 512, 1024, 2048, 4096)
"""Tokens of the requests in the table of pages."""

PARTS: Final[tuple[Callable[[Sequence[Compared]], str], ...]] = (
    summary,
    wrong_rows,
    speeds,
    rules_of_thumb,
    allocation,
)
"""Sections of the page, in their order."""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
