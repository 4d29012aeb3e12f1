"""An adapter of any of PEFT's methods on a bf16 causal language model, a plain loop on padded batches.

The steps of huggingface/peft's method_comparison/MetaMathQA/run.py: no autocast, adapters in fp32, clipping, the loss
read each step, outputs alive until the next.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import torch

IMPORTS = ("transformers.models.llama.modeling_llama", "peft")


def measure(
    model: str,
    adapter: dict[str, Any] | None,
    micro_batch: int,
    tokens: list[int],
    optimizer: dict[str, Any],
    fp32_adapters: bool = True,
) -> dict[str, int]:
    """Bytes reserved at most over steps whose longest sequence has so many tokens; the others are a fifth shorter.

    `adapter`: the fields of PEFT's configuration; None: every parameter is trained.
    """
    network = _loaded(model)
    if adapter is not None:
        network = _adapted(network, adapter, fp32_adapters)
    chosen = _optimizer(network, optimizer)
    network.train()
    for longest in tokens:
        batch = _padded(micro_batch, longest)
        chosen.zero_grad()
        outputs = network(**batch, num_items_in_batch=int(batch["attention_mask"].numel()))
        loss = outputs.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        chosen.step()
        loss.item()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def _optimizer(network: Any, options: dict[str, Any]) -> torch.optim.Optimizer:
    """AdamW; LoRA-FA's where the options name a rank."""
    if "r" in options:
        from peft.optimizers import create_lorafa_optimizer

        return create_lorafa_optimizer(network, **options)  # type: ignore[no-any-return]
    return torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], **options)


def _padded(rows: int, longest: int) -> dict[str, torch.Tensor]:
    """Token ids, labels and a mask with padding on the right of all rows but the first, (rows, longest)."""
    ids = torch.randint(1000, (rows, longest))
    mask = torch.ones_like(ids)
    mask[1:, longest - longest // 5 :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids.cuda(), "attention_mask": mask.cuda(), "labels": labels.cuda()}


def _loaded(model: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    values = json.loads((files("tonnage") / "catalog" / "models" / f"{model}.json").read_text())
    config = AutoConfig.for_model(**values)
    with no_init_weights():
        network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    network.tie_weights()
    return network.cuda()


def _adapted(network: Any, values: dict[str, Any], fp32: bool) -> Any:
    from peft import PeftConfig, get_peft_model

    config = PeftConfig.from_peft_type(**{"task_type": "CAUSAL_LM", **values})
    return get_peft_model(network, config, autocast_adapter_dtype=fp32)
