"""What an exported job needs beside what its plan was estimated to need under the target's engine, both on a ghost.

    python benchmarks/exports.py [TARGET...]

A small Llama is exported (for torchtitan, which has networks of its own, the smallest of its Llamas and the debug
models of its other families), as are small networks that read images, and what was exported is run as its users
would run it: `tonnage dry-run -- COMMAND`, on several GPUs one rank of them.  Where the export leaves a place for the
data there are rows of full length.  Prints tables, of which docs/reference/export.md shows a part; `=`: equal to the
estimate.  A target that is not installed is said and left out: LLaMA-Factory and axolotl each want a transformers of
their own.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tonnage.plans import Plan
from tonnage.trainers import packages, targets

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
    "dtype": "bfloat16",
}
ROWS = 200
JOB = {"seq_len": 512, "micro_batch": 2, "grad_accum": 2}
TITANS = "llama-3.2-1b"
ON_HOST = {"shard": "zero3", "param_offload": "cpu", "checkpointing": "full"}
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
    ("torchrun", "a100-80gb", {}, {"compile": "layers", "checkpointing": "full"}),
    ("torchrun", "8xa100-80gb", {}, {**ZERO3, "compile": "layers"}),
    ("torchrun", "a100-80gb", {}, {"compile": "model"}),
    ("hf-trainer", "a100-80gb", {}, {"compile": "model"}),
    ("torchrun", "a100-80gb", {}, ON_HOST),
    ("torchrun", "t4", {}, {**ON_HOST, "precision": "fp16-mixed", "accum_sync": True}),
    ("accelerate", "a100-80gb", {}, ON_HOST),
    ("hf-trainer", "a100-80gb", {}, ON_HOST),
    ("deepspeed", "a100-80gb", {}, ON_HOST),
    ("deepspeed", "a100-80gb", {}, {"shard": "zero2", "optimizer_offload": "cpu", "checkpointing": "full"}),
    ("trl", "a100-80gb", {}, {**ON_HOST, "loss": "chunked"}),
    ("torchtitan", "a100-80gb", {}, {**ON_HOST, "attention": "flash"}),
    ("axolotl", "a100-80gb", {}, {**ON_HOST, "precision": "bf16-true"}),
    ("llama-factory", "a100-80gb", {}, ON_HOST),
    ("torchrun", "t4", {"method": "lora"}, {"precision": "fp16-mixed", "loss": "chunked"}),
    ("torchtitan", "a100-80gb", {}, {"attention": "flash", "checkpointing": "full"}),
    (
        "torchtitan",
        "8xa100-80gb",
        {},
        {**ZERO3, "attention": "flash", "checkpointing": "selective", "loss": "chunked"},
    ),
    ("torchtitan", "8xa100-80gb", {}, {"attention": "flash", "shard": "zero3", "tp": 2, "checkpointing": "full"}),
    ("torchtitan", "8xa100-80gb", {}, {**ZERO3, "attention": "flash", "compile": "layers"}),
    ("axolotl", "a100-80gb", {"method": "lora"}, {"optimizer": "adamw-8bit"}),
    ("axolotl", "a100-80gb", {"method": "qlora"}, {"checkpointing": "full", "unquantized_dtype": "compute"}),
    ("axolotl", "a100-80gb", {}, {"precision": "fp32"}),
    ("axolotl", "8xa100-80gb", {}, {**ZERO3, "precision": "bf16-true"}),
    ("axolotl", "8xa100-80gb", {"method": "lora"}, {**ZERO3}),
    ("axolotl", "a100-80gb", {}, {"precision": "bf16-true", "checkpointing": "full"}),
    ("llama-factory", "a100-80gb", {"method": "lora"}, {"optimizer": "adamw-8bit"}),
    ("llama-factory", "a100-80gb", {"method": "qlora"}, {"checkpointing": "full", "unquantized_dtype": "compute"}),
    ("llama-factory", "a100-80gb", {}, {"checkpointing": "full"}),
    ("llama-factory", "8xa100-80gb", {}, {"shard": "ddp", "checkpointing": "full"}),
    ("llama-factory", "8xa100-80gb", {}, ZERO3),
]
"""Target, GPUs, job and plan."""

_TEXT = {**{name: value for name, value in TINY.items() if name not in ("architectures", "dtype")}, "head_dim": 64}
_TOWER = {
    **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"image_size": 112, "patch_size": 14},
}
NETWORKS: dict[str, dict[str, Any]] = {
    "llama": TINY,
    "llava": {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": _TEXT,
        "vision_config": {**_TOWER, "model_type": "clip_vision_model", "projection_dim": 128},
        "image_token_index": 2000,
    },
    "gemma3": {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {**_TEXT, "model_type": "gemma3_text"},
        "vision_config": {**_TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
        "mm_tokens_per_image": 16,
        "image_token_index": 2000,
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "text_config": {
            **_TEXT,
            "model_type": "qwen2_5_vl_text",
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]},
        },
        "vision_config": {
            **{"depth": 3, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "out_hidden_size": 256},
            **{"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
        },
        "image_token_id": 2000,
    },
}
"""Configurations by their types."""

_DEBUG = {"hidden_size": 256, "num_attention_heads": 16, "vocab_size": 2048, "max_position_embeddings": 4096}
DEBUG: dict[str, dict[str, Any]] = {
    "qwen3": {
        **{"model_type": "qwen3", **_DEBUG, "num_hidden_layers": 8, "num_key_value_heads": 8, "head_dim": 128},
        **{"intermediate_size": 3072, "tie_word_embeddings": True},
    },
    "qwen3_moe": {
        **{"model_type": "qwen3_moe", **_DEBUG, "num_hidden_layers": 8, "num_key_value_heads": 8, "head_dim": 128},
        **{"moe_intermediate_size": 768, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True},
    },
    "deepseek_v2": {
        **{"model_type": "deepseek_v2", **_DEBUG, "num_hidden_layers": 6, "intermediate_size": 1024},
        **{"moe_intermediate_size": 256, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3},
        **{"first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128},
        **{"qk_rope_head_dim": 64, "v_head_dim": 128},
        "rope_scaling": {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096},
    },
    "gpt_oss": {
        **{"model_type": "gpt_oss", **_DEBUG, "num_hidden_layers": 4, "num_attention_heads": 64},
        **{"num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880},
        **{"num_local_experts": 8, "num_experts_per_tok": 4},
    },
}
"""torchtitan's debug models as configurations of transformers."""
NETWORKS |= DEBUG

FAMILIES: list[tuple[str, str, str, dict[str, Any], dict[str, Any]]] = [
    ("qwen3", "torchtitan", "a100-80gb", {}, {"attention": "flash"}),
    ("qwen3", "torchtitan", "8xa100-80gb", {}, {**ZERO3, "attention": "flash", "tp": 2}),
    ("qwen3_moe", "torchtitan", "8xa100-80gb", {}, {"shard": "zero3", "attention": "flash"}),
    ("qwen3_moe", "torchtitan", "8xa100-80gb", {}, {**ZERO3, "attention": "flash", "ep": 4}),
    ("deepseek_v2", "torchtitan", "a100-80gb", {}, {"checkpointing": "selective"}),
    ("deepseek_v2", "torchtitan", "8xa100-80gb", {}, {**ZERO3, "ep": 2}),
    ("gpt_oss", "torchtitan", "8xa100-80gb", {}, {"shard": "zero2", "attention": "flash", "loss": "chunked"}),
    ("gpt_oss", "torchtitan", "8xa100-80gb", {}, {**ZERO3, "attention": "flash", "tp": 2, "ep": 4}),
]
"""The same of torchtitan's other families."""

SIZE = {"image_size": "224x224"}

SEEING: list[tuple[str, str, str, dict[str, Any], dict[str, Any]]] = [
    ("llava", "hf-trainer", "a100-80gb", {}, {}),
    ("llava", "hf-trainer", "8xa100-80gb", {}, ZERO3),
    ("gemma3", "hf-trainer", "8xa100-80gb", {"method": "lora"}, {"shard": "zero3", "checkpointing": "full"}),
    ("qwen2_5_vl", "hf-trainer", "a100-80gb", {**SIZE, "method": "qlora"}, {"checkpointing": "full"}),
    ("gemma3", "accelerate", "a100-80gb", {}, {"checkpointing": "selective", "loss": "chunked"}),
    ("gemma3", "accelerate", "8xa100-80gb", {"method": "lora"}, {"shard": "zero2"}),
    ("qwen2_5_vl", "accelerate", "8xa100-80gb", SIZE, {"shard": "zero3", "loss": "chunked"}),
    ("llava", "deepspeed", "8xa100-80gb", {}, {"shard": "zero2", "checkpointing": "full"}),
    ("qwen2_5_vl", "deepspeed", "8xa100-80gb", SIZE, {"shard": "zero3"}),
    ("qwen2_5_vl", "torchrun", "a100-80gb", SIZE, {"loss": "chunked"}),
    ("qwen2_5_vl", "torchrun", "8xa100-80gb", SIZE, {**ZERO3, "clip_grad_norm": 1}),
    ("gemma3", "torchrun", "8xa100-80gb", {"method": "lora"}, {"shard": "zero2", "loss": "chunked"}),
]
"""The same of networks that read images, which stand first."""

BESIDES = {
    "torchtitan": shlex.split(
        "--hf-assets-path ../tiny --dataloader.dataset c4_test --dataloader.dataset-path ../rows"
    )
}
"""What is typed besides the exported command, which names a tokenizer and data that are not here."""


def main() -> None:
    wanted = sys.argv[1:]
    print("| target | GPUs | plan | allocated, estimated | exported | reserved, estimated | exported |")
    print("|---|---|---|---:|---:|---:|---:|")
    for network, name, gpus, job, plan in (*(("llama", *case) for case in CASES), *FAMILIES, *SEEING):
        if wanted and name not in wanted:
            continue
        if missing := packages.missing(targets.find_target(name).packages):
            print(f"{name}: left out, {', '.join(missing)} not installed", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory() as folder:
            print(row(Path(folder), name, gpus, {**JOB, **job}, plan, network), flush=True)


def row(folder: Path, name: str, gpus: str, job: dict[str, Any], plan: dict[str, Any], network: str = "llama") -> str:
    """One line of the table."""
    to = targets.find_target(name)
    equip(folder, NETWORKS[network])
    model = TITANS if (network, name) == ("llama", "torchtitan") else "./tiny"
    (folder / "plan.toml").write_text(plan_file(model, gpus, job, plan))
    expected = asked(folder, "estimate", "--plan", "plan.toml", "--engine", engine(to, plan), "--json")["peak"]
    command = asked(folder, "export", "plan.toml", "--to", name, "--json")["command"]
    place_data(folder, name)
    one = ["--rank", "0"] if gpus[0] == "8" else []
    variables, words = launched(
        [*shlex.split(command), *(["--random-weights"] if to.scripted else BESIDES.get(name, ()))]
    )
    found = asked(folder / name, "dry-run", "--gpu", gpus, *one, "--json", "--", *words, **variables)["peak"]
    numbers = []
    for key in ("allocated_bytes", "reserved_bytes"):
        numbers += [f"{expected[key]:,}", "=" if found[key] == expected[key] else f"{found[key]:,}"]
    said = " ".join(f"{key}={value}" for key, value in {**job, **plan}.items() if key not in JOB) or "bf16-mixed"
    kind = "" if network == "llama" else f" {network}"
    return f"| `{name}`{kind} | {gpus} | {said} | {' | '.join(numbers)} |"


def engine(to: targets.Target, plan: dict[str, Any]) -> str:
    """Whose estimate is to be the same."""
    return to.engine or (to.base_engine(Plan(**plan)) if to.base_engine else "tonnage")


def equip(folder: Path, config: dict[str, Any]) -> None:
    """A network and a tokenizer without weights, and rows whose tokens with the one that ends them are JOB's."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<s>": 0, "</s>": 1, "word": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="word"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tiny = folder / "tiny"
    tiny.mkdir()
    tokenizer.save(str(tiny / "tokenizer.json"))
    kind = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
    }
    (tiny / "tokenizer_config.json").write_text(json.dumps(kind))
    (tiny / "config.json").write_text(json.dumps(config))
    (folder / "rows").mkdir()
    (folder / "rows" / "rows.jsonl").write_text((json.dumps({"text": "word " * (JOB["seq_len"] - 1)}) + "\n") * ROWS)


def place_data(folder: Path, name: str) -> None:
    """The rows where the export of a target has a place for them."""
    rows = folder / "rows" / "rows.jsonl"
    if name == "axolotl":
        shutil.copy(rows, folder / name / "DATA.jsonl")
    if name == "llama-factory":
        data = folder / name / "data"
        data.mkdir()
        shutil.copy(rows, data / "rows.jsonl")
        known = {"DATASET": {"file_name": "rows.jsonl", "columns": {"prompt": "text"}}}
        (data / "dataset_info.json").write_text(json.dumps(known))


def launched(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The variables of a command and the rest of it."""
    if words[0] != "env":
        return {}, words
    rest = next(place for place, word in enumerate(words) if place and "=" not in word)
    return dict(word.split("=", 1) for word in words[1:rest]), words[rest:]


def plan_file(model: str, gpus: str, job: dict[str, Any], plan: dict[str, Any]) -> str:
    """plan.toml."""
    lines = ["schema_version = 1", f'model = "{model}"', f'gpu = "{gpus}"']
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
