"""A plain LoRA fine-tune of any causal language model: transformers, peft, a loop.  Knows nothing of tonnage.

    python examples/lora.py MODEL [--attention sdpa] [--seq-len 512] [--micro-batch 2]

MODEL is a Hub id, or a folder with a config.json for a model with random weights.
"""

import argparse
import contextlib
import os

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForCausalLM


def load(name: str, attention: str) -> torch.nn.Module:
    """The model in fp16 on the GPU."""
    options = {"dtype": torch.float16, "attn_implementation": attention}
    if os.path.exists(os.path.join(name, "config.json")) and not os.path.exists(f"{name}/model.safetensors"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name), **options)
    else:
        model = AutoModelForCausalLM.from_pretrained(name, **options)
    model.config.use_cache = False
    return model.cuda()


def adapt(model: torch.nn.Module, rank: int) -> torch.nn.Module:
    """Freeze the model, add adapters to the attention projections, checkpoint every layer."""
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    return model.train()


def repeat_keys_and_values() -> None:
    """Before Ampere only the memory-efficient kernel is fused, and it takes no grouped queries: repeat them."""
    attend = torch.nn.functional.scaled_dot_product_attention

    def attend_repeated(query, key, value, *args, enable_gqa=False, **kwargs):  # type: ignore[no-untyped-def]
        groups = query.size(-3) // key.size(-3)
        if groups > 1:
            key, value = (tensor.repeat_interleave(groups, dim=-3) for tensor in (key, value))
        return attend(query, key, value, *args, **kwargs)

    torch.nn.functional.scaled_dot_product_attention = attend_repeated


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--attention", choices=("eager", "sdpa"), default="sdpa")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()

    fused = contextlib.nullcontext()
    if options.attention == "sdpa":
        repeat_keys_and_values()
        fused = sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)
    model = adapt(load(options.model, options.attention), options.rank)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    vocabulary = model.config.vocab_size
    batch = torch.randint(0, vocabulary, (options.micro_batch, options.seq_len), device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        out = model(input_ids=batch, labels=batch)
        out.loss.backward()
        optimizer.step()

    with fused:
        for _ in range(options.steps):
            step()
    print(f"allocated {torch.cuda.max_memory_allocated()}  reserved {torch.cuda.max_memory_reserved()}")


if __name__ == "__main__":
    main()
