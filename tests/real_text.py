"""Tiny networks and text that every machine has, Python's own documentation strings, as bytes."""

import builtins
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

IGNORED = -100
ROW = 32
"""Bytes of one sequence."""


def network(dtype: torch.dtype = torch.float32, *, seed: int = 0, **fields: Any) -> Any:
    """Return a tiny Llama with the same random weights each time."""
    sizes = {
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 64},
    }
    torch.manual_seed(seed)
    config = LlamaConfig(**{**sizes, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, **fields})
    return LlamaForCausalLM(config).to(dtype)


def network_of_experts(experts: int = 4) -> Any:
    """Return a tiny Qwen3-MoE with the same random weights each time."""
    torch.manual_seed(0)
    sizes = {
        **{"hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 256, "max_position_embeddings": 64},
    }
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model("qwen3_moe", num_experts=experts, num_experts_per_tok=2, **sizes)
    )


def text() -> bytes:
    """Return the documentation strings of Python's built-in functions and classes."""
    named = (getattr(builtins, name).__doc__ for name in sorted(dir(builtins)))
    return "\n".join(doc for doc in named if isinstance(doc, str)).encode("utf-8", "replace")


def batches(steps: int, micro_batches: int = 1, rows: int = 2) -> list[list[dict[str, torch.Tensor]]]:
    """Return the micro-batches of each step, all of full length."""
    size = rows * ROW
    content = torch.tensor(list(text()[: steps * micro_batches * size]), dtype=torch.long)
    parts = iter(content.view(-1, rows, ROW))
    return [
        [{"input_ids": ids, "labels": ids.clone()} for ids in (next(parts) for _ in range(micro_batches))]
        for _ in range(steps)
    ]


def pairs() -> tuple[T5ForConditionalGeneration, list[dict[str, torch.Tensor]]]:
    """Return a T5 of four layers, whose decoder has a configuration of its own, and four rows for it."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 4, "num_heads": 2, "vocab_size": 64}
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0))
    rows = torch.arange(1, 41).view(4, 10)
    return model, [{"input_ids": row, "labels": row.clone()} for row in rows]
