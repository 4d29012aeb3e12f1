"""Published ladders of techniques, step by step on the ghost: writes the tables of docs/reference/ladders.md.

python benchmarks/ladders.py > docs/reference/ladders.md

torchtune's runs with its own modules and the torch of its day, which are got first (benchmarks/accuracy/software.py).
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from asking import one_line, run, table

from tonnage.errors import TonnageError
from tonnage.units import GIB
from tonnage.workers.worker import Worker

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks, as a package

from benchmarks.accuracy import software
from benchmarks.accuracy.rows import Row
from benchmarks.accuracy.runner import Predicted, predict

TEXT = Path(__file__).parent / "ladders.md"


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One row of a published table."""

    name: str
    """What the source calls it."""
    published_gib: float
    """The memory that it gives."""
    options: dict[str, Any] | None = field(default_factory=dict)
    """The options of `tonnage estimate` that say the same; None where there are none."""


@dataclass(frozen=True, kw_only=True)
class TorchtuneRung(Rung):
    """A row of torchtune's table, which its own modules can take."""

    arguments: dict[str, Any]
    """Those of benchmarks/accuracy/scripts/torchtune_ladder.py, but for the batch."""
    change_percent: float | None = None
    """What the source says that the step changed, of the row before; None of the first and where it is not said."""


SOFTWARE = ("torchtune 1814feb1", "torch 2.5.1")
"""Of the day of the table: its own commit, and the last torch before it."""
SOURCE = "https://github.com/pytorch/torchtune"

TORCHTUNE = {"model": "llama-3.2-3b", "gpu": "a100-80gb", "seq_len": 4096, "micro_batch": 2, "precision": "bf16-true"}
_FUSED = {"optimizer": "adamw-fused"}
_COMPILED = {**_FUSED, "compile": "layers"}
_CHUNKED = {**_COMPILED, "loss": "chunked"}
_CHECKPOINTED = {**_CHUNKED, "checkpointing": "full"}
_IN_BACKWARD = {**_CHECKPOINTED, "optimizer_in_backward": True}
_OFFLOADED = {**_IN_BACKWARD, "activation_offload": "cpu-streamed"}
_EIGHT_BIT = {**_OFFLOADED, "optimizer": "adamw-8bit"}

_FULL: dict[str, Any] = {"method": "full"}
_AND_COMPILED = {**_FULL, "compiled": True}
_AND_CHUNKED = {**_AND_COMPILED, "chunked": True}
_AND_CHECKPOINTED = {**_AND_CHUNKED, "checkpointing": True}
_AND_IN_BACKWARD = {**_AND_CHECKPOINTED, "in_backward": True}
_AND_OFFLOADED = {**_AND_IN_BACKWARD, "offload": True}
_AND_EIGHT_BIT = {**_AND_OFFLOADED, "optimizer": "torchao.prototype.low_bit_optim.AdamW8bit"}
_ADAPTED = {**_AND_CHECKPOINTED, "offload": True}

BASELINE_TOKENS = 256
"""Of a row of the baseline, which is not packed; up to 500 or so the peak is the same."""

TORCHTUNE_RUNGS = (
    TorchtuneRung(name="baseline", published_gib=25.5, arguments={**_FULL, "packed": False}, options=None),
    TorchtuneRung(
        name="+ packed to 4,096 tokens", published_gib=60.0, arguments=_FULL, options=_FUSED, change_percent=135.16
    ),
    TorchtuneRung(
        name="+ compile", published_gib=51.0, arguments=_AND_COMPILED, options=_COMPILED, change_percent=-14.93
    ),
    TorchtuneRung(
        name="+ chunked cross-entropy",
        published_gib=42.9,
        arguments=_AND_CHUNKED,
        options=_CHUNKED,
        change_percent=-15.83,
    ),
    TorchtuneRung(
        name="+ activation checkpointing",
        published_gib=24.9,
        arguments=_AND_CHECKPOINTED,
        options=_CHECKPOINTED,
        change_percent=-41.93,
    ),
    TorchtuneRung(
        name="+ optimizer in backward",
        published_gib=23.1,
        arguments=_AND_IN_BACKWARD,
        options=_IN_BACKWARD,
        change_percent=-7.29,
    ),
    TorchtuneRung(
        name="+ activation offload",
        published_gib=21.8,
        arguments=_AND_OFFLOADED,
        options=_OFFLOADED,
        change_percent=-5.48,
    ),
    TorchtuneRung(
        name="+ 8-bit AdamW",
        published_gib=17.6,
        arguments=_AND_EIGHT_BIT,
        options=_EIGHT_BIT,
        change_percent=-19.63,
    ),
    TorchtuneRung(
        name="LoRA", published_gib=8.5, arguments={**_ADAPTED, "method": "lora"}, options=None, change_percent=-51.61
    ),
    TorchtuneRung(
        name="QLoRA",
        published_gib=4.6,
        arguments={**_ADAPTED, "method": "qlora"},
        options=None,
        change_percent=-45.71,
    ),
)

EIGHT_BIT = (
    ("torchao's", "torchao.prototype.low_bit_optim.AdamW8bit"),
    ("bitsandbytes'", "bitsandbytes.optim.AdamW8bit"),
    ("bitsandbytes', paged", "bitsandbytes.optim.PagedAdamW8bit"),
)

ANSWER_AI = {
    "model": "llama-2-7b",
    "gpu": "2xrtx-3090",
    "lora_rank": 64,
    "lora_dropout": 0.1,
    "lora_targets": ("k_proj", "q_proj", "v_proj", "up_proj", "down_proj", "gate_proj"),
    "unquantized_dtype": "compute",
    "precision": "bf16-true",
    "checkpointing": "full",
    "shard": "zero3",
}


def lora(tokens: int, batch: int, **more: Any) -> dict[str, Any]:
    return {"method": "lora", "seq_len": tokens, "micro_batch": batch, **more}


def qlora(tokens: int, batch: int, **more: Any) -> dict[str, Any]:
    return {"method": "qlora", "seq_len": tokens, "micro_batch": batch, **more}


ANSWER_AI_RUNGS = (
    Rung(name="LoRA, FSDP, 1 x 512", published_gib=10.24, options=lora(512, 1)),
    Rung(name="LoRA, FSDP, 1 x 2,048", published_gib=10.22, options=lora(2048, 1)),
    Rung(name="LoRA, FSDP, 4 x 2,048", published_gib=16.14, options=lora(2048, 4)),
    Rung(name="LoRA, FSDP, 6 x 2,048", published_gib=21.35, options=lora(2048, 6)),
    Rung(name="LoRA, replicated, 4 x 2,048", published_gib=22.04, options=lora(2048, 4, shard="ddp")),
    Rung(name="QLoRA, FSDP, 1 x 512", published_gib=4.98, options=qlora(512, 1)),
    Rung(name="QLoRA, FSDP, 10 x 2,048", published_gib=20.97, options=qlora(2048, 10)),
    Rung(name="QLoRA, replicated, 8 x 2,048", published_gib=20.94, options=qlora(2048, 8, shard="ddp")),
)


def climbed(worker: Worker) -> Iterator[tuple[str, ...]]:
    """A row for every rung of Answer.AI's, and a reason for what is not run."""
    for rung in ANSWER_AI_RUNGS:
        try:
            peak = run(worker, **{**ANSWER_AI, **(rung.options or {})}).estimate.peak
        except TonnageError as error:
            yield (rung.name, f"{rung.published_gib:.2f}", "-", "-", "-", f"left out: {one_line(error)}")
            continue
        reserved_gib = peak.reserved_bytes / GIB
        yield (
            rung.name,
            f"{rung.published_gib:.2f}",
            _off(reserved_gib, rung.published_gib),
            f"{peak.allocated_bytes / GIB:.2f}",
            f"{reserved_gib:.2f}",
            f"peak in {peak.phase}",
        )


def refined(published_gib: Sequence[float], changes_percent: Sequence[float]) -> list[float]:
    """The rows before they were rounded to a tenth, GiB: each is the first one times the changes up to it.

    Every row leaves a range for the first one; the middle of what all of them leave is taken. The changes are rounded
    themselves, by 0.01 % in all.
    """
    factors = list(accumulate((1 + change / 100 for change in changes_percent), mul, initial=1.0))
    least = max((gib - 0.05) / factor for gib, factor in zip(published_gib, factors, strict=True))
    most = min((gib + 0.05) / factor for gib, factor in zip(published_gib, factors, strict=True))
    return [(least + most) / 2 * factor for factor in factors]


def asked(name: str, arguments: dict[str, Any], published_gib: float, *, micro_batch: int, seq_len: int) -> Row:
    """What torchtune's modules are to do; a baseline has rows of its own length."""
    tokens = seq_len if arguments.get("packed", True) else BASELINE_TOKENS
    return Row(
        name=name,
        source="torchtune",
        url=SOURCE,
        public=True,
        gpu="a100-80gb",
        script="torchtune_ladder",
        arguments={**arguments, "micro_batch": micro_batch, "seq_len": tokens},
        software=SOFTWARE,
        measured={"active": published_gib},
    )


def torchtune_rows() -> dict[str, list[Row]]:
    """By the name of the table in the text."""
    final = {"micro_batch": 2, "seq_len": 4096}
    changes = [rung.change_percent for rung in TORCHTUNE_RUNGS if rung.change_percent is not None]
    exact = refined([rung.published_gib for rung in TORCHTUNE_RUNGS], changes)
    rungs = [asked(rung.name, rung.arguments, gib, **final) for rung, gib in zip(TORCHTUNE_RUNGS, exact, strict=True)]
    eight_bit_gib = rungs[[rung.arguments for rung in TORCHTUNE_RUNGS].index(_AND_EIGHT_BIT)].measured["active"]
    kinds = [
        asked(name, {**_AND_OFFLOADED, "optimizer": optimizer}, eight_bit_gib, **final)
        for name, optimizer in EIGHT_BIT
    ]
    normed = [replace(row, arguments={**row.arguments, "norm_compiled": True}) for row in rungs if is_compiled(row)]
    return {"torchtune": rungs, "normed": normed, "eight_bit": kinds}


def is_compiled(row: Row) -> bool:
    """Whether its layers are."""
    return bool(row.arguments.get("compiled"))


def beside(row: Row, predicted: Predicted) -> tuple[str, ...]:
    """Published, the ghost's active memory, how far off, and reserved."""
    published_gib = row.measured["active"]
    if "error" in predicted:
        return (row.name, f"{published_gib:.2f}", "-", f"not run: {predicted['error']}", "-")
    return (
        row.name,
        f"{published_gib:.2f}",
        f"{predicted['active']:.2f}",
        _off(predicted["active"], published_gib, digits=2),
        f"{predicted['reserved']:.2f}",
    )


def estimated(worker: Worker, rung: Rung, published_gib: float) -> str:
    """How far off `tonnage estimate` is, of allocated memory; a dash where its options cannot say the rung."""
    if rung.options is None:
        return "-"
    try:
        peak = run(worker, **{**TORCHTUNE, **rung.options}).estimate.peak
    except TonnageError as error:
        return f"not run: {one_line(error)}"
    return _off(peak.allocated_bytes / GIB, published_gib)


def _off(gib: float, published_gib: float, digits: int = 1) -> str:
    return f"{100 * (gib / published_gib - 1):+.{digits}f} %"


def torchtune_tables(worker: Worker, answers: Mapping[str, Predicted]) -> dict[str, str]:
    """Markdown by the name of the table in the text; `answers` by job."""
    rows = torchtune_rows()
    lines = {name: [beside(row, answers[row.job]) for row in those] for name, those in rows.items()}
    columns = ("ghost active", "ghost off by", "ghost reserved")
    normed = {line[0]: line[3] for line in lines["normed"]}
    ladder = [
        (
            line[0],
            f"{rung.published_gib:.1f}",
            *line[1:],
            normed.get(line[0], "-"),
            estimated(worker, rung, row.measured["active"]),
        )
        for line, row, rung in zip(lines["torchtune"], rows["torchtune"], TORCHTUNE_RUNGS, strict=True)
    ]
    exact = ("step", "published active, GiB", "by its percentages")
    return {
        "torchtune": table((*exact, *columns, "last norm compiled too: off by", "`estimate` off by"), ladder),
        "eight_bit": table(("AdamW8bit", "published active, GiB", *columns), lines["eight_bit"]),
    }


def main() -> None:
    text = TEXT.read_text()
    software.main(SOFTWARE)
    jobs = [row for rows in torchtune_rows().values() for row in rows]
    answers = {row.job: predicted for row, predicted in predict(jobs)}
    with Worker() as worker:
        tables = torchtune_tables(worker, answers)
        headings = ("step", "published reserved, GiB", "ghost off by", "ghost allocated", "ghost reserved", "remark")
        tables["answer_ai"] = table(headings, list(climbed(worker)))
    for name, lines in tables.items():
        text = text.replace(f"{{{name}}}\n", lines)
    print(text, end="")


if __name__ == "__main__":
    main()
