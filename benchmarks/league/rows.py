"""The jobs of the league."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODELS = ("llama-2-7b", "llama-3-8b", "llama-3-70b", "llama-3.1-405b")


def full() -> list[dict[str, Any]]:
    """Full fine-tuning that nobody measured, from 7 to 405 billion parameters."""
    return [{"model": model, "method": "full", "seq_len": 4096, "micro_batch": 1} for model in MODELS]


def lora() -> list[dict[str, Any]]:
    """Published runs on a T4, with their sources."""
    lines = (ROOT / "measurements" / "published" / "fitcheck-t4.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if not row["arguments"]["quantized"]]
    return [
        {"method": "lora", "gpu": row["gpu"], **row["arguments"], "allocated_gib": row["measured"]["allocated"]}
        for row in rows
    ]
