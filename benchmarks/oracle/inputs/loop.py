"""A loop of its own that fits, runs out of memory, or fails.

python loop.py fits|too-large|fails
"""

import sys

import torch
from torch import nn


def main() -> None:
    how = sys.argv[1]
    model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    rows = 2**22 if how == "too-large" else 512
    for step in range(4):
        if step == 2 and how == "fails":
            raise ValueError("The third batch is damaged.")
        optimizer.zero_grad()
        model(torch.randn(rows, 1024, device="cuda")).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
