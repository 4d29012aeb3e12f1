"""An LSTM of two layers over 16 sequences of 128 vectors, for two steps of plain SGD by hand."""

import json

import torch
from torch import nn

network = nn.LSTM(512, 512, 2, device="cuda", dtype=torch.bfloat16)
given = torch.randn(128, 16, 512, device="cuda", dtype=torch.bfloat16)
before = torch.cuda.memory_allocated()
for _ in range(2):
    output, state = network(given)
    kept = torch.cuda.memory_allocated() - before - sum(tensor.nbytes for tensor in (output, *state))
    output.sum().backward()
    with torch.no_grad():
        for weight in network.parameters():
            weight -= 1e-3 * weight.grad
            weight.grad = None
    del output, state
    before = torch.cuda.memory_allocated()
print(
    json.dumps(
        {"kept": kept, "allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    )
)
