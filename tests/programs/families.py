"""A plain training loop over a small network of a well-known family; prints what torch counted.

python families.py llama [--steps 3] [--precision bf16-mixed] [--checkpointing] [--accumulate 2]
"""

import argparse
import contextlib
import json

import torch
import transformers

VOCABULARY, WIDTH, HEADS, LAYERS = 512, 64, 4, 2
TEXT = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS}
DECODER = {**TEXT, "intermediate_size": 2 * WIDTH, "num_key_value_heads": 2, "max_position_embeddings": 512}

FAMILIES = {
    "llama": ("LlamaForCausalLM", transformers.LlamaConfig, DECODER),
    "qwen3": ("Qwen3ForCausalLM", transformers.Qwen3Config, {**DECODER, "head_dim": 16}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        transformers.Qwen3MoeConfig,
        {**DECODER, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "mixtral": ("MixtralForCausalLM", transformers.MixtralConfig, {**DECODER, "num_local_experts": 4}),
    "gpt2": (
        "GPT2LMHeadModel",
        transformers.GPT2Config,
        {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS, "n_positions": 512},
    ),
    "bert": ("BertForMaskedLM", transformers.BertConfig, {**TEXT, "intermediate_size": 2 * WIDTH}),
    "t5": (
        "T5ForConditionalGeneration",
        transformers.T5Config,
        {
            **{"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 16, "d_ff": 2 * WIDTH, "num_layers": LAYERS},
            **{"num_heads": HEADS, "decoder_start_token_id": 0},
        },
    ),
    "vit": (
        "ViTForImageClassification",
        transformers.ViTConfig,
        {
            **{"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS},
            **{"intermediate_size": 2 * WIDTH, "image_size": 64, "patch_size": 16, "num_labels": 10},
        },
    ),
}


def build(family: str) -> torch.nn.Module:
    """The network on the host, in fp32."""
    name, config, fields = FAMILIES[family]
    config = config(**fields)
    config.use_cache = False
    return getattr(transformers, name)(config)


def batch(family: str, micro_batch: int, seq_len: int) -> dict[str, torch.Tensor]:
    """One batch on the host."""
    if family == "vit":
        return {
            "pixel_values": torch.randn(micro_batch, 3, 64, 64),
            "labels": torch.randint(0, 10, (micro_batch,)),
        }
    tokens = torch.randint(0, VOCABULARY, (micro_batch, seq_len))
    return {"input_ids": tokens, "labels": tokens.clone()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--precision", choices=("fp32", "bf16-true", "bf16-mixed", "fp16-mixed"), default="bf16-mixed"
    )
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=128)
    options = parser.parse_args()

    model = build(options.family)
    model = model.to("cuda", torch.bfloat16 if options.precision == "bf16-true" else torch.float32).train()
    if options.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    mixed = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}.get(options.precision)
    scaler = torch.amp.GradScaler("cuda", enabled=options.precision == "fp16-mixed")

    for _ in range(options.steps):
        for _ in range(options.accumulate):
            inputs = {
                name: tensor.cuda()
                for name, tensor in batch(options.family, options.micro_batch, options.seq_len).items()
            }
            if options.precision == "bf16-true" and "pixel_values" in inputs:
                inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
            with torch.autocast("cuda", mixed) if mixed else contextlib.nullcontext():
                loss = model(**inputs).loss / options.accumulate
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    print(
        json.dumps(
            {
                "allocated": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(),
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "loss": loss.item(),
            }
        )
    )


if __name__ == "__main__":
    main()
