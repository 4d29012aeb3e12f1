"""LoRA and QLoRA as a plain loop: two steps on one batch, then torch's own counters.

The steps of fitcheck-llm's scripts/measure.py.  Reads no weights: the network is made from its configuration, moved
to the card as a loaded one is, and quantized there.
"""

from __future__ import annotations

import contextlib
import json
from importlib.resources import files
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

IMPORTS = ("transformers.models.llama.modeling_llama", "peft", "bitsandbytes.nn")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def measure(
    model: str,
    attention: str,
    quantized: bool,
    micro_batch: int,
    seq_len: int,
    lora_rank: int,
    double_quant: bool = False,
) -> dict[str, int]:
    """Bytes at the peak of two steps of fp16 LoRA under checkpointing."""
    network = _adapted(_loaded(model, attention, quantized, double_quant), quantized, lora_rank)
    after_load_bytes = torch.cuda.memory_allocated()
    optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=1e-4)
    batch = torch.randint(0, network.config.vocab_size, (micro_batch, seq_len), device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        out = network(input_ids=batch, labels=batch)
        out.loss.backward()
        optimizer.step()

    with _fused(attention):
        step()
        torch.cuda.reset_peak_memory_stats()
        step()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "after_load_bytes": after_load_bytes,
    }


def _loaded(model: str, attention: str, quantized: bool, double_quant: bool) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    values = json.loads((files("tonnage") / "catalog" / "models" / f"{model}.json").read_text())
    config = AutoConfig.for_model(**values)
    with no_init_weights():
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float16, attn_implementation=attention)
    network.tie_weights()
    network.config.use_cache = False
    if quantized:
        _replace_linears(network, double_quant)
    return network.cuda()


def _replace_linears(network: torch.nn.Module, double_quant: bool) -> None:
    """Every linear layer but the head becomes NF4, as transformers' integration does it."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for name, module in list(network.named_modules()):
        if not isinstance(module, torch.nn.Linear) or name == "lm_head":
            continue
        new = Linear4bit(
            module.in_features,
            module.out_features,
            bias=module.bias is not None,
            compute_dtype=torch.float16,
            compress_statistics=double_quant,
            quant_type="nf4",
            device="meta",
        )
        new.weight = Params4bit(
            module.weight.data, requires_grad=False, compress_statistics=double_quant, quant_type="nf4", module=new
        )
        new.bias = module.bias
        parent, _, leaf = name.rpartition(".")
        setattr(network.get_submodule(parent), leaf, new)
    network.is_loaded_in_4bit = True  # type: ignore[assignment]
    network.is_quantized = True  # type: ignore[assignment]


def _adapted(network: Any, quantized: bool, rank: int) -> Any:
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    if quantized:
        network = prepare_model_for_kbit_training(network, use_gradient_checkpointing=True)
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=list(TARGETS), task_type="CAUSAL_LM"
    )
    network = get_peft_model(network, config)
    network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    network.enable_input_require_grads()
    return network.train()


def _fused(attention: str) -> contextlib.AbstractContextManager[None]:
    """The memory-efficient kernel alone, with keys and values repeated, which it needs before Ampere."""
    if attention != "sdpa":
        return contextlib.nullcontext()
    attend = torch.nn.functional.scaled_dot_product_attention

    def repeated(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        groups = query.size(-3) // key.size(-3)
        if groups > 1:
            key, value = (tensor.repeat_interleave(groups, dim=-3) for tensor in (key, value))
            kwargs.pop("enable_gqa", None)
        return attend(query, key, value, *args, **kwargs)

    torch.nn.functional.scaled_dot_product_attention = repeated
    return sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)
