"""Only generates: 3 prompts of 20 tokens and 12 more each, with a cache that grows or one of fixed size."""

import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

LAYERS, HEADS, WIDTH = 3, 2, 64


def complete(cache: str) -> None:
    config = LlamaConfig(
        **{"vocab_size": 1000, "hidden_size": 4 * WIDTH, "intermediate_size": 512, "num_hidden_layers": LAYERS},
        **{"num_attention_heads": 4, "num_key_value_heads": HEADS, "max_position_embeddings": 2048},
    )
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        prompts = torch.randint(3, 1000, (3, 20))
    kind = {} if cache == "dynamic" else {"cache_implementation": cache, "disable_compile": True}
    model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=12, do_sample=False, **kind)


if __name__ == "__main__":
    complete(sys.argv[1])
