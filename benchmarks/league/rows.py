"""The jobs of the league.

A row has model, method, precision, checkpointing, seq_len, micro_batch; of adapters lora_rank, of some attention;
where somebody measured it, allocated_gib.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks" / "gpu"))  # a step's peaks are those that `compare.py` reads

import compare  # noqa: E402

MODELS = ("llama-2-7b", "llama-3-8b", "llama-3-70b", "llama-3.1-405b")
RECORDED = ROOT / "measurements" / "h100-2026-11-26.jsonl"

DESCRIBED: Final = ("llama", "qwen2", "qwen3", "gemma2")
"""Decoders with gated MLPs, which all these tools can describe."""

USUAL: Final = {
    **{"engine": "tonnage", "optimizer": "adamw", "shard": "none", "loss": "plain", "attention": "auto"},
    **{"allocator": "default", "base_dtype": None, "optimizer_offload": "none", "activation_offload": "none"},
}
"""What nearly all of these tools take for granted."""


def full() -> list[dict[str, Any]]:
    """Full fine-tuning that nobody measured, from 7 to 405 billion parameters."""
    plan = {"precision": "bf16-true", "checkpointing": "none"}
    return [{"model": model, "method": "full", "seq_len": 4096, "micro_batch": 1, **plan} for model in MODELS]


def recorded() -> list[dict[str, Any]]:
    """Steps of our H100, on which nobody's constants were fitted, that most of the tools can be asked for."""
    records = compare.read(RECORDED).cases.values()
    return [_row(record) for record in records if _sayable(record)]


def _sayable(record: dict[str, Any]) -> bool:
    job, plan = record["job"], record["plan"]
    usual = all(plan[name] == value for name, value in USUAL.items()) and job["grad_accum"] == 1
    kept = plan["checkpointing"] in ("none", "full") and plan["precision"].startswith("bf16")
    known = job["model"]["config"].get("model_type") in DESCRIBED
    return usual and kept and known and record["limit_bytes"] is None and "oom" not in record


def _row(record: dict[str, Any]) -> dict[str, Any]:
    job, plan = record["job"], record["plan"]
    return {
        "model": job["model"]["name"],
        **{name: job[name] for name in ("method", "seq_len", "micro_batch", "lora_rank", "lora_targets")},
        **{name: plan[name] for name in ("precision", "checkpointing")},
        "attention": "sdpa",
        "allocated_gib": compare.peaks(record).allocated_bytes / 2**30,
        "record": {"job": job, "plan": plan, "versions": record["versions"]},
    }


def lora() -> list[dict[str, Any]]:
    """Published runs on a T4, with their sources."""
    lines = (ROOT / "measurements" / "published" / "fitcheck-t4.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if not row["arguments"]["quantized"]]
    return [
        {
            **{"method": "lora", "precision": "fp16", "checkpointing": "full", "script": "examples/lora.py"},
            **{"gpu": row["gpu"], **row["arguments"], "allocated_gib": row["measured"]["allocated"]},
        }
        for row in rows
    ]
