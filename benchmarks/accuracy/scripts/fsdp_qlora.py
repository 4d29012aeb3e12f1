"""LoRA and QLoRA of Llama 2 7B in pure bf16, divided by FSDP1 among two cards or not, on rows of one length.

What train.py of AnswerDotAI/fsdp_qlora (05ed9f2) runs on its data set `dummy`, as a rank that gets its weights from
another: rank 64 on all products but the output of attention, dropout of 0.1, layers checkpointed with reentrance.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp.wrap import _or_policy, lambda_auto_wrap_policy, transformer_auto_wrap_policy
from torch.nn import functional

IMPORTS = ("transformers.models.llama.modeling_llama", "peft", "peft.tuners.lora.bnb", "bitsandbytes.nn")

TARGETS = ["q_proj", "k_proj", "v_proj", "up_proj", "down_proj", "gate_proj"]


def measure(quantized: bool, strategy: str, seq_len: int, micro_batch: int) -> dict[str, int]:
    """Bytes at the peak of three steps; `strategy` is one of FSDP1's."""
    from peft import LoraConfig, get_peft_model
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    with torch.device("meta"):
        config = transformers.LlamaConfig(intermediate_size=11008, num_hidden_layers=32, use_cache=False)
        model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    if quantized:
        _quantize(model.model)
        torch.cuda.empty_cache()
    lora = LoraConfig(task_type="CAUSAL_LM", r=64, lora_alpha=16, lora_dropout=0.1, target_modules=TARGETS)
    adapted = get_peft_model(model, lora, autocast_adapter_dtype=False, low_cpu_mem_usage=True)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    divided = fsdp.FullyShardedDataParallel(
        adapted,
        sharding_strategy=fsdp.ShardingStrategy[strategy],
        auto_wrap_policy=partial(
            _or_policy,
            policies=[
                partial(lambda_auto_wrap_policy, lambda_fn=_is_trained),
                partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}),
            ],
        ),
        use_orig_params=False,
        limit_all_gathers=True,
        device_id=0,
        sync_module_states=True,
        param_init_fn=lambda module: module.to_empty(device="cuda", recurse=False),
    )
    adapted.enable_input_require_grads()
    apply_activation_checkpointing(
        divided,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
        check_fn=lambda module: isinstance(module, LlamaDecoderLayer),
    )
    optimizer = torch.optim.AdamW(divided.parameters(), lr=1e-5, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
    divided.train()
    for _ in range(3):
        ids, labels = (torch.zeros(micro_batch, seq_len, dtype=torch.int64).to("cuda") for _ in range(2))
        logits = divided(ids, attention_mask=None).logits.float()
        shifted = logits[..., :-1, :].contiguous()  # as transformers had it then, and it returned the first ones
        loss = functional.cross_entropy(shifted.view(-1, shifted.shape[-1]), labels[..., 1:].contiguous().view(-1))
        del shifted
        loss.backward()
        loss.item()
        optimizer.step()
        optimizer.zero_grad()
        del logits, loss
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def _is_trained(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return not list(module.children()) and weight is not None and weight.requires_grad


def _quantize(model: nn.Module) -> None:
    """Each product to NF4 in storage of bf16: what says how stays on the card, the weights become meta."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                linear = Linear4bit(
                    child.in_features,
                    child.out_features,
                    bias=False,
                    compute_dtype=torch.bfloat16,
                    quant_type="nf4",
                    quant_storage=torch.bfloat16,
                    device="meta",
                )
                plain = torch.empty(child.out_features, child.in_features, dtype=torch.bfloat16, device="cuda")
                packed = Params4bit(
                    plain, requires_grad=False, quant_type="nf4", quant_storage=torch.bfloat16, module=linear
                ).cuda(0)
                linear.weight = Params4bit(packed.data.to("meta"), **packed.__dict__)
                setattr(parent, name, linear)
