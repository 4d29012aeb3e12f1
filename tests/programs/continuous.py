"""Answers prompts by transformers' continuous batching, on the device that is named, and prints the engine's cache.

`continuous.py DEVICE BLOCKS SHARE`; the engine chooses the number of blocks if BLOCKS is 0.
"""

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache

make = PagedAttentionCache.__init__


def show(cache: Any, *args: Any, **kwargs: Any) -> None:
    make(cache, *args, **kwargs)
    print(json.dumps({"blocks": cache.num_blocks, "bytes": cache.cache_tensor.nbytes}), flush=True)


PagedAttentionCache.__init__ = show  # type: ignore[method-assign]


def answer(device: str, blocks: int, share: float) -> None:
    config = LlamaConfig(
        **{"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048},
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    batching = ContinuousBatchingConfig(
        page_size=32, num_blocks=blocks or None, max_batch_tokens=128, max_memory_percent=share
    )
    told = model.generate_batch(
        [list(range(5, 5 + length)) for length in (7, 40, 90)],
        generation_config=GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1),
        continuous_batching_config=batching,
    )
    print(json.dumps({"lengths": sorted(len(each.generated_tokens) for each in told.values())}), flush=True)


if __name__ == "__main__":
    answer(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
