"""Ranks that fill their cards up to what NCCL's buffers need too.

torchrun --nproc-per-node 2 nearly_full.py cached|full|first
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

MIB = 2**20
LEFT_MIB = 100
"""Of what is free before NCCL's first collective; less than its buffers."""


def block(size_mib: int) -> torch.Tensor:
    return torch.empty(size_mib * MIB, dtype=torch.uint8, device="cuda")


def main(how: str) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    held = [torch.zeros(1, device="cuda")]
    before = torch.cuda.mem_get_info()[0]
    most_mib = before // MIB - LEFT_MIB
    if how == "first":  # before NCCL has anything
        held.append(block(most_mib))
    dist.all_reduce(held[0])
    after = torch.cuda.mem_get_info()[0]
    dist.all_reduce(held[0])
    again = torch.cuda.mem_get_info()[0]
    cached_mib = 1000 if how == "cached" else 0
    if cached_mib:
        block(cached_mib)  # given back at once, and kept by the allocator
    held.append(block(most_mib - cached_mib))

    model = nn.Linear(8, 8).cuda()
    model(torch.ones(1, 8, device="cuda")).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    said = {"rank": dist.get_rank(), "taken": [before - after, after - again], "retries": retries}
    os.write(1, (json.dumps(said) + "\n").encode())  # in one piece: the ranks share the pipe
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
