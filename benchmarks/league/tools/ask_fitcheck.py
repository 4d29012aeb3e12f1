"""fitcheck-llm: a closed form; what it gives beside `overhead` is compared with allocated memory."""

from typing import Any

from answering import answer
from fitcheck.config_parser import ModelConfig
from fitcheck.estimator import TrainingConfig, estimate
from fitcheck.gpu_db import get_gpu

from tonnage.catalog.models import find_model

ENOUGH_MIB = 2**23
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def described(name: str) -> ModelConfig:
    known = find_model(name)
    assert known is not None
    config = known.config()
    heads = config["num_attention_heads"]
    return ModelConfig(
        name=name,
        num_params=known.parameters,
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_attention_heads=heads,
        num_kv_heads=config.get("num_key_value_heads", heads),
        intermediate_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        tie_word_embeddings=config.get("tie_word_embeddings", False),
    )


def trained(row: dict[str, Any]) -> TrainingConfig:
    precision, _, mixed = row["precision"].partition("-")
    adapters = row["method"] == "lora"
    return TrainingConfig(
        precision=precision,
        optimizer_dtype="fp32" if adapters or mixed == "mixed" else precision,
        lora_rank=row["lora_rank"] if adapters else None,
        lora_targets=LINEAR if "lora_targets" in row else ATTENTION,
        grad_checkpoint=row["checkpointing"] == "full",
        flash_attn=row.get("attention", "sdpa") == "sdpa",
        batch_size=row["micro_batch"],
        seq_len=row["seq_len"],
    )


def ask(row: dict[str, Any]) -> tuple[float, str]:
    gpu = get_gpu("t4") if row.get("gpu") == "t4" else get_gpu(vram_mib=ENOUGH_MIB)
    report = estimate(described(row["model"]), trained(row), gpu)
    tensors = report.total_mib - report.overhead_mib
    means = "its tensors; keeps an fp32 master copy" if row["method"] == "full" else "its tensors"
    return tensors * 2**20, f"{means}; process {report.total_mib / 1024:.2f}"


answer(ask)
