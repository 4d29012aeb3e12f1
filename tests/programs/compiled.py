"""A network under torch.compile, trained for a few steps; `hooked`: by Dynamo alone, with a hook of all modules."""

import json
import sys

import torch
from torch import nn


class Block(nn.Module):
    """A gated MLP with a norm and a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, 4 * width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def main() -> None:
    hooked = sys.argv[1:] == ["hooked"]
    if hooked:
        nn.modules.module.register_module_forward_pre_hook(lambda module, args: None)
    model = nn.Sequential(Block(256), Block(256)).to("cuda", torch.bfloat16)
    run = torch.compile(model, backend="eager" if hooked else "inductor")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(3):
        loss = run(torch.randn(8, 128, 256, device="cuda", dtype=torch.bfloat16)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(json.dumps({"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}))


if __name__ == "__main__":
    main()
