"""Loads a model from a folder that may hold nothing but a config.json, and trains it for a step or two.

python pretrained.py FOLDER [--on-card|--on-cards]
"""

import json
import resource
import sys
import time

import torch
from transformers import LlamaForCausalLM


def main() -> None:
    placed = {"--on-card": {"device_map": "cuda"}, "--on-cards": {"device_map": "auto"}}
    options = placed.get(sys.argv[-1], {}) | {"from_tf": False}
    began = time.perf_counter()
    model = LlamaForCausalLM.from_pretrained(
        pretrained_model_name_or_path=sys.argv[1], dtype=torch.bfloat16, **options
    )
    seconds = time.perf_counter() - began
    if not options.get("device_map"):
        model.cuda()
    model.train()
    tokens = torch.randint(0, model.config.vocab_size, (1, 32)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(
        json.dumps(
            {
                "seconds": seconds,
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "allocated": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(),
                "cards": len({parameter.device for parameter in model.parameters()}),
                "packed": sum(parameter.dtype == torch.uint8 for parameter in model.parameters()),
                "beams": model.generation_config.num_beams,
                "first": float(next(model.parameters()).flatten()[0]),
            }
        )
    )


if __name__ == "__main__":
    main()
