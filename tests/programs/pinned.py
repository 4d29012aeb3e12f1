"""Page-locked host memory: a buffer, and a loader that pins its batches."""

import json

import torch
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    layer = torch.nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    staging = torch.empty(64 * 2**20, dtype=torch.uint8, pin_memory=True)
    loader = DataLoader(TensorDataset(torch.randn(48, 1024)), batch_size=16, pin_memory=True)
    pinned = []
    for (rows,) in loader:
        pinned.append(rows.is_pinned())
        layer(rows.to("cuda", non_blocking=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(json.dumps({"pinned": pinned, "staging": staging.numel()}))


if __name__ == "__main__":
    main()
