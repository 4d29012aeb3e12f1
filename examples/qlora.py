"""A plain QLoRA fine-tune of any causal language model: transformers, bitsandbytes, peft, a loop.  Knows nothing of
tonnage.

    python examples/qlora.py MODEL [--attention sdpa] [--seq-len 512] [--micro-batch 2] [--double]

MODEL is a Hub id, or a folder with a config.json and weights.
"""

import argparse
import contextlib
import json

import torch
from lora import repeat_keys_and_values
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


def load(name: str, attention: str, double: bool) -> torch.nn.Module:
    """The model in NF4 on the GPU, computing in fp16."""
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float16,
        bnb_4bit_use_double_quant=double,
    )
    model = AutoModelForCausalLM.from_pretrained(
        name,
        dtype=torch.float16,
        attn_implementation=attention,
        quantization_config=four_bits,
        device_map={"": 0},
    )
    model.config.use_cache = False
    return model


def adapt(model: torch.nn.Module, rank: int) -> torch.nn.Module:
    """Cast what is not quantized to fp32, add adapters to the attention projections, checkpoint every layer."""
    model = prepare_model_for_kbit_training(model)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    return model.train()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--attention", choices=("eager", "sdpa"), default="sdpa")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--double", action="store_true", help="quantize the scales as well")
    options = parser.parse_args()

    fused = contextlib.nullcontext()
    if options.attention == "sdpa":
        repeat_keys_and_values()
        fused = sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)
    model = adapt(load(options.model, options.attention, options.double), options.rank)
    loaded = torch.cuda.memory_allocated()
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
    peaks = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    print(json.dumps({"loaded": loaded, **peaks}))


if __name__ == "__main__":
    main()
