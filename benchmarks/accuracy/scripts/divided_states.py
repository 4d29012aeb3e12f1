"""Twenty linear layers under DDP and one step of Adam, whose states are divided among ranks or not.

What the recipe for ZeroRedundancyOptimizer in PyTorch's tutorials runs on two ranks over Gloo.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, ROWS = 2000, 20, 20


def measure(divided: bool) -> dict[str, int]:
    """Bytes at the peak of one step."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, device="cuda") for _ in range(LAYERS)))
    parallel = DistributedDataParallel(model, device_ids=[0])
    if divided:
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
            parallel.parameters(), optimizer_class=torch.optim.Adam, lr=0.01, foreach=False
        )
    else:
        optimizer = torch.optim.Adam(parallel.parameters(), lr=0.01, foreach=False)
    outputs = parallel(torch.randn(ROWS, WIDTH).to("cuda"))
    labels = torch.randn(ROWS, WIDTH).to("cuda")
    nn.functional.mse_loss(outputs, labels).backward()
    optimizer.step()
    return {"allocated_bytes": torch.cuda.max_memory_allocated()}
