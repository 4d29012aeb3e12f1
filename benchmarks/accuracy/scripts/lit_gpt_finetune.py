"""Steps of LitGPT's fine-tuning scripts, on its own networks, with the longest sequence of the data set.

What finetune/lora.py and finetune/full.py of Lightning-AI/litgpt do in bf16.  The networks are those of the folders
that the environment variables LIT_GPT (6178c7cc of October 2023) and LITGPT (41dece20 of March 2024) name; they
import lightning.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch

IMPORTS = ("lit_gpt", "lit_gpt.lora", "lit_gpt.utils", "litgpt", "litgpt.lora", "litgpt.utils")
SHORT_TOKENS = 110  # the median of Alpaca


def prepare() -> None:
    """Make the networks importable, once for all jobs."""
    sys.path[:0] = [os.environ[name] for name in ("LIT_GPT", "LITGPT") if name in os.environ]


def measure(
    package: str, model: str, micro_batch: int, seq_len: int, lora: dict[str, Any] | None, accumulate: int
) -> dict[str, int]:
    """Bytes at the peak; `package` is lit_gpt or litgpt, `lora` what its configuration is told of adapters."""
    if package.upper() not in os.environ:
        raise RuntimeError(f"{package.upper()} does not name a folder with its networks")
    module = importlib.import_module(f"{package}.lora" if lora else package)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        network = module.GPT(module.Config.from_name(model, **(lora or {})))
    torch.set_default_dtype(torch.float32)
    if lora:
        module.mark_only_lora_as_trainable(network)
    trainable = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=3e-4, weight_decay=0.01)
    network.max_seq_length = seq_len
    loss_of = importlib.import_module(f"{package}.utils").chunked_cross_entropy
    network.train()
    logits: Any = None
    for tokens in (seq_len, SHORT_TOKENS, seq_len):
        for _ in range(accumulate):
            ids = torch.zeros(micro_batch, tokens, dtype=torch.int64).pin_memory().to("cuda")
            targets = torch.zeros(micro_batch, tokens, dtype=torch.int64).pin_memory().to("cuda")
            # Fabric casts to fp32 what a network returns
            if lora:
                logits = [chunk.float() for chunk in network(ids, lm_head_chunk_size=128)]
                logits[-1] = logits[-1][..., :-1, :]
                loss = loss_of(logits, targets[..., 1:])
            else:
                logits = network(ids).float()
                loss = loss_of(logits[..., :-1, :], targets[..., 1:])
            (loss / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"allocated_bytes": torch.cuda.max_memory_allocated()}
