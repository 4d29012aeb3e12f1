"""The portable source beside the ghost: the catalog's models under several plans, cards in turn.

    python benchmarks/meta.py [MODEL ...] [--plan NAME ...] [--layers N] [--gpu NAME ...]

Two optimizer steps of each on a card of 8 TiB (rank 0 of several: 1 TiB), once on a ghost and once imitated, and how
far allocated and reserved peaks are apart.  `--layers` cuts each of a model's stacks down to so many layers (default:
all).  Prints a Markdown table of the rows beyond LIMIT, and a summary of all.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.catalog.models import model_names
from tonnage.errors import TonnageError
from tonnage.estimates import predict
from tonnage.job import Job
from tonnage.plans import Plan
from tonnage.trainers.cases import request
from tonnage.workers.worker import Worker

PLANS: dict[str, dict[str, Any]] = {
    "full": {},
    "bf16-true": {"precision": "bf16-true"},
    "bf16-true fused": {"precision": "bf16-true", "optimizer": "adamw-fused"},
    "fp16-mixed eager": {"precision": "fp16-mixed", "attention": "eager"},
    "fp32 sgd": {"precision": "fp32", "optimizer": "sgd"},
    "lora": {"method": "lora"},
    "checkpointing full": {"checkpointing": "full"},
    "checkpointing selective": {"checkpointing": "selective"},
    "accumulation, clipping": {"grad_accum": 2, "clip_grad_norm": 1},
    "bf16-true loop, expandable": {"precision": "bf16-true", "optimizer": "adamw-loop", "allocator": "expandable"},
}
RANKS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp, 8 ranks, accumulation": ("8x", {"shard": "ddp", "grad_accum": 2}),
    "zero1, 8 ranks": ("8x", {"shard": "zero1"}),
    "zero2, 8 ranks, accumulation": ("8x", {"shard": "zero2", "grad_accum": 2}),
    "zero3, 8 ranks, checkpointing, clipping": (
        "8x",
        {"shard": "zero3", "checkpointing": "full", "clip_grad_norm": 1, "precision": "bf16-true"},
    ),
    "zero3, 64 ranks": ("8x8x", {"shard": "zero3"}),
    "zero3, 64 ranks, lora, expandable": (
        "8x8x",
        {"shard": "zero3", "method": "lora", "precision": "bf16-true", "allocator": "expandable"},
    ),
    "hsdp, 2 x 8 ranks": ("2x8x", {"shard": "hsdp"}),
    "tp 8, 8 ranks": ("8x", {"tp": 8}),
    "tp 4, ddp, 16 ranks, clipping": ("2x8x", {"tp": 4, "shard": "ddp", "clip_grad_norm": 1}),
    "tp 2, zero3, 64 ranks, checkpointing": (
        "8x8x",
        {"tp": 2, "shard": "zero3", "checkpointing": "full", "precision": "bf16-true"},
    ),
    "pp 2, zero2, 8 ranks": ("8x", {"pp": 2, "shard": "zero2", "grad_accum": 4}),
    "pp 2 x 2 stages, tp 2, ddp, 8 ranks": (
        "8x",
        {
            **{"pp": 2, "pp_schedule": "interleaved", "tp": 2, "shard": "ddp"},
            **{"grad_accum": 4, "precision": "bf16-true", "optimizer": "adamw-fused"},
        },
    ),
    "cp 4, zero3, 64 ranks": ("8x8x", {"cp": 4, "shard": "zero3", "precision": "bf16-true"}),
    "cp 2, tp 2, ddp, 8 ranks": ("8x", {"cp": 2, "tp": 2, "shard": "ddp"}),
    "tp 4 on whole sequences, zero3, 8 ranks": ("8x", {"tp": 4, "shard": "zero3", "sequence_parallel": "off"}),
}
"""Plans for several cards: how many of them, written before the card's name."""
GPUS = ("a100-80gb", "h100-80gb", "rtx-4090", "t4", "b200")
CAPACITY_BYTES = {"one": 8 * 2**40, "several": 2**40}
"""More than any row needs; of several cards less, as torch reserves addresses for each stream's segments anew."""
STEPS = 2
SEQ_LEN = 2048
LIMIT = 0.005
"""Rows further apart than this are listed one by one."""
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")
"""What configurations call the number of layers."""
POSITIONS = ("max_target_positions", "max_position_embeddings", "n_positions")


@dataclass(frozen=True)
class Row:
    """One job under one plan on one card, by both sources."""

    model: str
    plan: str
    gpu: str
    phase: str
    allocated_bytes: int
    allocated_off: float
    reserved_off: float
    seconds: float
    """Of the portable source."""

    def __str__(self) -> str:
        off = f"{self.allocated_off:+.2%} | {self.reserved_off:+.2%}"
        return (
            f"| {self.model} | {self.plan} | {self.gpu} | {self.phase} | {self.allocated_bytes / 2**30:.2f} | {off} |"
        )


def cut(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The configuration with at most so many layers."""
    found = {name: min(value, layers) if name in DEPTHS and value else value for name, value in config.items()}
    if found.get("layer_types"):
        found["layer_types"] = found["layer_types"][:layers]
    return {name: cut(value, layers) if isinstance(value, dict) else value for name, value in found.items()}


def asked(model: str, options: dict[str, Any], layers: int | None) -> tuple[Job, Plan]:
    """The job: SEQ_LEN tokens, or as many as the model has positions for."""
    job, plan = request(model, offline=True, **options)
    most = min((job.model.config[name] for name in POSITIONS if job.model.config.get(name)), default=SEQ_LEN)
    if layers is not None:
        job = replace(job, model=replace(job.model, config=cut(job.model.config, layers)))
    return replace(job, seq_len=min(most, SEQ_LEN)), plan


def compared(model: str, name: str, gpu: str, layers: int | None, worker: Worker) -> Row:
    """Both sources' answers."""
    cards, options = RANKS.get(name, ("", PLANS.get(name, {})))
    job, plan = asked(model, options, layers)
    cluster = parse_cluster(f"{cards}{gpu}", gpu_memory_bytes=CAPACITY_BYTES["several" if cards else "one"])
    real = predict.estimate(Case(job, plan, cluster), steps=STEPS, worker=worker).estimate.peak
    began = time.perf_counter()
    imitated = predict.estimate(Case(job, plan, cluster), steps=STEPS, source="meta", fresh=True).estimate.peak
    return Row(
        model,
        name,
        gpu,
        real.phase,
        real.allocated_bytes,
        imitated.allocated_bytes / real.allocated_bytes - 1,
        imitated.reserved_bytes / real.reserved_bytes - 1,
        time.perf_counter() - began,
    )


def rows(models: list[str], plans: list[str], gpus: list[str], layers: int | None) -> Iterator[Row]:
    """One after the other; what a source refuses is said on standard error."""
    cards = cycle(gpus)
    with Worker() as worker:
        for model in models:
            for plan, gpu in zip(plans, cards, strict=False):
                try:
                    row = compared(model, plan, gpu, layers, worker)
                except TonnageError as error:
                    sys.stderr.write(f"{model}, {plan}: {error}\n")
                    continue
                sys.stderr.write(f"{row} {row.seconds:.1f} s\n")
                yield row


def summary(name: str, values: list[float]) -> str:
    """How far apart in all."""
    ordered = sorted(map(abs, values))
    high = ordered[math.ceil(0.95 * len(ordered)) - 1]
    equal = sum(value == 0 for value in ordered)
    return (
        f"| {name} | {statistics.median(ordered):.3%} | {high:.3%} | {ordered[-1]:.3%} | {equal} of {len(ordered)} |"
    )


def main() -> None:
    """Compare, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=model_names())
    parser.add_argument("--plan", nargs="+", choices=[*PLANS, *RANKS], default=list(PLANS))
    parser.add_argument("--gpu", nargs="+", default=GPUS)
    parser.add_argument("--layers", type=int)
    chosen = parser.parse_args()
    found = list(rows(chosen.models, chosen.plan, chosen.gpu, chosen.layers))
    lines = ["| | median | 95th percentile | worst | equal to the byte |", "|---|---:|---:|---:|---:|"]
    lines += [summary("allocated", [row.allocated_off for row in found])]
    lines += [summary("reserved", [row.reserved_off for row in found])]
    lines += ["", "| model | plan | card | peak in | GiB | allocated off | reserved off |"]
    lines += ["|---|---|---|---|---:|---:|---:|"]
    lines += [str(row) for row in found if max(abs(row.allocated_off), abs(row.reserved_off)) > LIMIT]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
