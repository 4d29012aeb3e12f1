"""Published ladders of techniques, step by step on the ghost: writes the tables of docs/ladders.md.

python benchmarks/ladders.py > docs/ladders.md
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asking import one_line, run, table

from tonnage.errors import TonnageError
from tonnage.ghost.pool import Worker
from tonnage.units import GIB

TEXT = Path(__file__).parent / "ladders.md"


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One row of a published table."""

    name: str
    """What the source calls it."""
    published_gib: float
    """The memory that it gives."""
    options: dict[str, Any] | None = field(default_factory=dict)
    """The options that say the same here; None where there are none."""
    why_not: str = ""
    """What stands against it, where there are none."""


TORCHTUNE = {"model": "llama-3.2-3b", "gpu": "a100-80gb", "seq_len": 4096, "micro_batch": 2, "precision": "bf16-true"}
_FUSED = {"optimizer": "adamw-fused"}
_CHUNKED = {**_FUSED, "loss": "chunked"}
_CHECKPOINTED = {**_CHUNKED, "checkpointing": "full"}
_IN_BACKWARD = {**_CHECKPOINTED, "optimizer_in_backward": True}
_OFFLOADED = {**_IN_BACKWARD, "activation_offload": "cpu-streamed"}

TORCHTUNE_RUNGS = (
    Rung(name="baseline", published_gib=25.5, options=None, why_not="Alpaca unpacked: lengths vary from row to row"),
    Rung(name="+ packed to 4,096 tokens", published_gib=60.0, options=_FUSED),
    Rung(name="+ compile", published_gib=51.0, options=None, why_not="`estimate` does not compile; a dry-run does"),
    Rung(name="+ chunked cross-entropy", published_gib=42.9, options=_CHUNKED),
    Rung(name="+ activation checkpointing", published_gib=24.9, options=_CHECKPOINTED),
    Rung(name="+ optimizer in backward", published_gib=23.1, options=_IN_BACKWARD),
    Rung(name="+ activation offload", published_gib=21.8, options=_OFFLOADED),
    Rung(name="+ 8-bit AdamW", published_gib=17.6, options={**_OFFLOADED, "optimizer": "adamw-8bit"}),
    Rung(name="LoRA", published_gib=8.5, options=None, why_not="rank and targets are not stated in the table"),
    Rung(name="QLoRA", published_gib=4.6, options=None, why_not="the same"),
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


def climbed(
    worker: Worker, rungs: tuple[Rung, ...], common: dict[str, Any], metric: str
) -> Iterator[tuple[str, ...]]:
    """A row for every rung that can be said here, and a reason for every other; `metric` is what was published."""
    for rung in rungs:
        if rung.options is None:
            yield (rung.name, f"{rung.published_gib:.2f}", "-", "-", "-", f"left out: {rung.why_not}")
            continue
        try:
            peak = run(worker, **{**common, **rung.options}).estimate.peak
        except TonnageError as error:
            yield (rung.name, f"{rung.published_gib:.2f}", "-", "-", "-", f"left out: {one_line(error)}")
            continue
        allocated, reserved = peak.allocated_bytes / GIB, peak.reserved_bytes / GIB
        compared = allocated if metric == "allocated" else reserved
        yield (
            rung.name,
            f"{rung.published_gib:.2f}",
            f"{100 * (compared / rung.published_gib - 1):+.1f} %",
            f"{allocated:.2f}",
            f"{reserved:.2f}",
            f"peak in {peak.phase}",
        )


def headings(metric: str) -> tuple[str, ...]:
    return ("step", f"published {metric}, GiB", "ghost off by", "ghost allocated", "ghost reserved", "remark")


def main() -> None:
    text = TEXT.read_text()
    with Worker() as worker:
        for name, rungs, common, metric in (
            ("torchtune", TORCHTUNE_RUNGS, TORCHTUNE, "allocated"),
            ("answer_ai", ANSWER_AI_RUNGS, ANSWER_AI, "reserved"),
        ):
            rows = list(climbed(worker, rungs, common, metric))
            text = text.replace(f"{{{name}}}\n", table(headings(metric), rows))
    print(text, end="")


if __name__ == "__main__":
    main()
