"""Extension libraries whose own kernels and optimizers keep states or weights in fewer bits.

python low_bits.py KIND       KIND: adamw8bit | paged | linear4bit (bitsandbytes), torchao
"""

import json
import sys

import torch

WIDTH, LAYERS, BATCH = 1024, 8, 256


def network() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def build(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    if kind == "torchao":
        from torchao.optim import AdamW8bit

        model = network().to("cuda", torch.bfloat16)
        return model, AdamW8bit(model.parameters())
    import bitsandbytes as bnb

    if kind == "linear4bit":
        frozen = [bnb.nn.Linear4bit(WIDTH, WIDTH, bias=False, compute_dtype=torch.bfloat16) for _ in range(LAYERS)]
        model = torch.nn.Sequential(*frozen, torch.nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)).cuda()
        return model, torch.optim.AdamW(model[-1].parameters())
    model = network().cuda()
    return model, (bnb.optim.PagedAdamW8bit if kind == "paged" else bnb.optim.AdamW8bit)(model.parameters())


def main(kind: str) -> None:
    model, optimizer = build(kind)
    for _ in range(3):
        batch = torch.randn(BATCH, WIDTH, device="cuda", dtype=next(model[-1].parameters()).dtype)
        model(batch).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(json.dumps({"parameters": LAYERS * WIDTH * WIDTH, "allocated": torch.cuda.max_memory_allocated()}))


if __name__ == "__main__":
    main(sys.argv[1])
