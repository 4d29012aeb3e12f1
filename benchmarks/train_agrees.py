"""`tonnage estimate --plan P` beside `tonnage dry-run -- tonnage train P`: bytes of every field, and seconds.

    python -m benchmarks.train_agrees [NAME ...]

A Llama of four layers trains on text of its own making under each plan.  Printed are the fields that differ, those of
time included, and the seconds of both; the command exits with 1 if any differs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

CONFIG: Final = {
    **{"model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 512},
}

PLANS: Final[dict[str, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "plain": ("a100-40gb", {}, {}),
    "fp16, clipped, checkpointed, sliced": (
        "t4",
        {"precision": "fp16-mixed", "clip_grad_norm": 1.0, "checkpointing": "full", "loss": "chunked"},
        {"grad_accum": 3},
    ),
    "bf16-true, states and activations on the host": (
        "a100-40gb",
        {"precision": "bf16-true", "optimizer_offload": "cpu=0.5", "activation_offload": "cpu-streamed"},
        {},
    ),
    "selective, clipped, updated in backward": (
        "h100-80gb",
        {"checkpointing": "selective", "optimizer_in_backward": True, "clip_grad_norm": 1.0},
        {"grad_accum": 1},
    ),
    "adafactor, fused loss": ("l4", {"optimizer": "adafactor", "loss": "fused"}, {}),
    "budget of activations": ("a100-40gb", {"checkpointing": "budget=8MiB"}, {}),
    "packed": ("a100-40gb", {}, {"packing": 128}),
    "ddp on two": ("2xa100-40gb", {"shard": "ddp"}, {}),
    "zero3 on two": ("2xa100-40gb", {"shard": "zero3", "checkpointing": "full"}, {}),
    "tp on two": ("2xa100-40gb", {"tp": 2}, {}),
    "pp on two": ("2xa100-40gb", {"pp": 2}, {"grad_accum": 4}),
    "deepspeed, zero2, states on the host": (
        "a100-40gb",
        {"engine": "deepspeed", "shard": "zero2", "optimizer_offload": "cpu", "clip_grad_norm": 1.0},
        {},
    ),
    "deepspeed, zero3, fp16, in files": (
        "a100-40gb",
        {
            **{"engine": "deepspeed", "shard": "zero3", "precision": "fp16-mixed", "checkpointing": "full"},
            **{"optimizer_offload": "nvme", "param_offload": "nvme"},
        },
        {"grad_accum": 3},
    ),
    "deepspeed, zero1 on two": ("2xa100-40gb", {"engine": "deepspeed", "shard": "zero1", "precision": "fp32"}, {}),
    "deepspeed, zero3 on two": ("2xa100-40gb", {"engine": "deepspeed", "shard": "zero3"}, {}),
    "ep on two": ("2xa100-40gb", {"ep": 2, "shard": "zero3"}, {}),
}
"""Card, options of the plan and of the job."""

EXPERTS: Final = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
"""Fields of the network under plans that divide experts."""

FIELDS: Final = ("allocated_bytes", "reserved_bytes", "process_bytes", "by_category", "phases")


TIMES: Final = ("step_seconds", "low_seconds", "high_seconds", "mfu", "bound_by")


def main() -> int:
    """Print a line a plan; return 1 if anything differs."""
    names = sys.argv[1:] or list(PLANS)
    print("| plan | what differs | estimate s | train s |\n|---|---|---:|---:|")
    differs = False
    for name in names:
        estimated, trained = answers(*PLANS[name])
        wrong = differences(estimated, trained)
        differs |= bool(wrong)
        seconds = (
            format(document["time"].get("step_seconds") or float("nan"), ".4f") for document in (estimated, trained)
        )
        print(f"| {name} | {'; '.join(wrong) or 'none'} | {' | '.join(seconds)} |", flush=True)
    return int(differs)


def answers(gpu: str, plan: dict[str, Any], job: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the JSON documents of the estimate and of the dry-run."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**CONFIG, **(EXPERTS if "ep" in plan else {})}))
        (Path(folder) / "data.txt").write_text(
            "All the world's a stage, and all the men and women merely players. " * 400
        )
        (Path(folder) / "plan.toml").write_text(_plan(gpu, plan, job))
        common = ["--gpu", gpu, "--json", "--no-advice"]
        train = [
            "train",
            "plan.toml",
            "--model",
            "config.json",
            "--data",
            "data.txt",
            "--out",
            "run",
            "--max-steps",
            "6",
        ]
        ranks = int(gpu.partition("x")[0]) if gpu[0].isdigit() else 1
        python = [sys.executable, "-m", "tonnage"]
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "-m", "tonnage"]
        command = [sys.executable, *launcher, *train] if ranks > 1 else [*python, *train]
        estimate = [*python, "estimate", "config.json", "--plan", "plan.toml", *common]
        dry_run = [*python, "dry-run", *common, "--", *command]
        return _run(estimate, folder), _run(dry_run, folder)


def differences(estimated: dict[str, Any], trained: dict[str, Any]) -> list[str]:
    """Return the fields of the peak, its categories, the phases and the time that are not equal.

    What the command does around its steps is not estimated: a phase that it alone has is left out.
    """
    names = {phase["name"] for phase in estimated["phases"]}
    trained = {**trained, "phases": [phase for phase in trained["phases"] if phase["name"] in names]}
    flat = [_flatten(document) for document in (estimated, trained)]
    return [
        f"{key} {flat[0].get(key)} / {flat[1].get(key)}"
        for key in dict.fromkeys([*flat[0], *flat[1]])
        if flat[0].get(key) != flat[1].get(key)
    ]


def _flatten(document: dict[str, Any]) -> dict[str, Any]:
    peak = document["peak"]
    flat: dict[str, Any] = {name: peak[name] for name in FIELDS[:3]}
    flat |= peak["by_category"]
    for phase in document["phases"]:
        flat |= {f"{phase['name']} {name}": phase[name] for name in FIELDS[:2]}
    return flat | {name: document["time"].get(name) for name in TIMES}


def _plan(gpu: str, plan: dict[str, Any], job: dict[str, Any]) -> str:
    lines = ["schema_version = 1", 'model = "config.json"', f'gpu = "{gpu}"']
    defaults = {"seq_len": 128, "micro_batch": 4, "grad_accum": 2}
    for name, values in (("job", {**defaults, **job}), ("plan", {"precision": "bf16-mixed", **plan})):
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _run(command: list[str], folder: str) -> dict[str, Any]:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if not done.stdout.startswith("{"):
        sys.exit(f"{' '.join(command)}\n{done.stderr[-1500:]}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


if __name__ == "__main__":
    sys.exit(main())
