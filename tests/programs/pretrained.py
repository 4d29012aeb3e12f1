"""Loads a model from a folder that may hold nothing but a config.json, and trains it for a step or two.

python pretrained.py FOLDER [--on-card]
"""

import json
import resource
import sys
import time

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    options = {"device_map": "cuda"} if "--on-card" in sys.argv else {}
    began = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16, **options)
    seconds = time.perf_counter() - began
    model.cuda().train()
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
                "first": float(next(model.parameters()).flatten()[0]),
            }
        )
    )


if __name__ == "__main__":
    main()
