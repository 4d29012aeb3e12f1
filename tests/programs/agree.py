"""Ranks that must agree before they train: small values really travel between them.

torchrun --nproc-per-node 4 agree.py
"""

import json
import os

import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank, size = dist.get_rank(), dist.get_world_size()

    settings = [{"width": 64, "name": "agreed"} if rank == 0 else None]
    dist.broadcast_object_list(settings, src=0)
    width = settings[0]["width"]

    ranks = torch.tensor([rank], device="cuda")
    dist.all_reduce(ranks)
    gathered = [torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(size)]
    dist.all_gather(gathered, torch.tensor([10 * rank], device="cuda"))
    everyone: list[object] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank})

    model = nn.parallel.DistributedDataParallel(nn.Linear(width, width).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = 0
    while True:
        loss = model(torch.randn(4, width, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        # The last rank has data for two steps only; all stop together.
        empty = torch.tensor([1 if rank == size - 1 and steps == 2 else 0], device="cuda")
        dist.all_reduce(empty)
        if empty.item() > 0:
            break
    said = {
        "rank": rank,
        "name": settings[0]["name"],
        "sum": ranks.item(),
        "gathered": [tensor.item() for tensor in gathered],
        "everyone": [entry["rank"] for entry in everyone],  # type: ignore[index]
        "steps": steps,
    }
    os.write(1, (json.dumps(said) + "\n").encode())  # in one piece: four ranks share the pipe
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
