"""What an exported job needs beside what its plan was estimated to need under the target's engine, both on a ghost.

    python benchmarks/exports.py [TARGET...]

A small Llama is exported, and the exported script is run as its users would run it: `tonnage dry-run -- COMMAND`, on
several GPUs one rank of them.  Prints a table; docs/export.md has it.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tonnage import exports
from tonnage.exports import installed

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 2048,
}
JOB = {"seq_len": 512, "micro_batch": 2, "grad_accum": 2}
ZERO3 = {"shard": "zero3", "checkpointing": "full", "allocator": "expandable"}

CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("hf-trainer", "a100-80gb", {}, {"checkpointing": "full", "allocator": "expandable"}),
    ("hf-trainer", "8xa100-80gb", {}, ZERO3),
    ("hf-trainer", "a100-80gb", {"method": "lora"}, {"attention": "flash"}),
    ("trl", "a100-80gb", {}, {"checkpointing": "full", "loss": "chunked"}),
    ("trl", "8xa100-80gb", {}, {**ZERO3, "loss": "chunked"}),
    ("accelerate", "a100-80gb", {}, {"checkpointing": "selective", "loss": "chunked"}),
    ("accelerate", "8xa100-80gb", {}, ZERO3),
    ("deepspeed", "8xa100-80gb", {}, {"shard": "zero2", "checkpointing": "full"}),
    ("deepspeed", "8xa100-80gb", {}, {"shard": "zero3"}),
    ("torchrun", "a100-80gb", {}, {"optimizer": "adamw-fused", "loss": "chunked"}),
    ("torchrun", "8xa100-80gb", {}, {**ZERO3, "clip_grad_norm": 1}),
    ("torchrun", "8xa100-80gb", {}, {"shard": "zero1"}),
]
"""Target, GPUs, job and plan."""


def main() -> None:
    wanted = sys.argv[1:]
    print("| target | GPUs | plan | allocated, estimated | exported | reserved, estimated | exported |")
    print("|---|---|---|---:|---:|---:|---:|")
    for name, gpus, job, plan in CASES:
        if (wanted and name not in wanted) or installed.missing(exports.target(name).packages):
            continue
        with tempfile.TemporaryDirectory() as folder:
            print(row(Path(folder), name, gpus, {**JOB, **job}, plan), flush=True)


def row(folder: Path, name: str, gpus: str, job: dict[str, Any], plan: dict[str, Any]) -> str:
    """One line of the table."""
    (folder / "tiny").mkdir()
    (folder / "tiny" / "config.json").write_text(json.dumps(TINY))
    (folder / "plan.toml").write_text(plan_file(gpus, job, plan))
    engine = exports.target(name).engine or "tonnage"
    expected = asked(folder, "estimate", "--plan", "plan.toml", "--engine", engine, "--json")["peak"]
    command = asked(folder, "export", "plan.toml", "--to", name, "--json")["command"]
    one = ["--rank", "0"] if gpus[0] == "8" else []
    variables, words = launched([*shlex.split(command), "--random-weights"])
    found = asked(folder / name, "dry-run", "--gpu", gpus, *one, "--json", "--", *words, **variables)["peak"]
    numbers = [f"{peak[key]:,}" for key in ("allocated_bytes", "reserved_bytes") for peak in (expected, found)]
    said = " ".join(f"{key}={value}" for key, value in {**job, **plan}.items() if key not in JOB) or "bf16-mixed"
    return f"| `{name}` | {gpus} | {said} | {' | '.join(numbers)} |"


def launched(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The variables of a command and the rest of it."""
    if words[0] != "env":
        return {}, words
    rest = next(place for place, word in enumerate(words) if place and "=" not in word)
    return dict(word.split("=", 1) for word in words[1:rest]), words[rest:]


def plan_file(gpus: str, job: dict[str, Any], plan: dict[str, Any]) -> str:
    """plan.toml."""
    lines = ["schema_version = 1", 'model = "./tiny"', f'gpu = "{gpus}"']
    for table, values in (("job", job), ("plan", plan)):
        lines += [f"[{table}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
    return "\n".join(lines) + "\n"


def asked(folder: Path, *arguments: str, **variables: str) -> dict[str, Any]:
    """The document that a command prints."""
    ended = subprocess.run(
        [sys.executable, "-m", "tonnage", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
    )
    if ended.returncode:
        raise SystemExit(f"tonnage {' '.join(arguments)}: {ended.stderr.strip()[-2000:]}")
    document: dict[str, Any] = json.loads(ended.stdout)
    return document


if __name__ == "__main__":
    main()
