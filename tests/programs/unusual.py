"""Scripts that do something unusual: one way each.

python unusual.py crashes|hangs|no-gpu|never-steps|spawns|workers|exits|exits-hard|index|talks|subprocess|dies
"""

import os
import subprocess
import sys
import time


def train(steps: int = 2) -> None:
    """A little training."""
    import torch

    layer = torch.nn.Linear(32, 32).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(steps):
        layer(torch.randn(4, 32, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def child(rank: int) -> None:
    """What a spawned process does."""
    train()


def with_workers() -> None:
    """Data from two forked workers, pinned."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    layer = torch.nn.Linear(32, 32).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    rows = TensorDataset(torch.randn(64, 32))
    for (batch,) in DataLoader(rows, batch_size=16, num_workers=2, pin_memory=True, persistent_workers=True):
        layer(batch.cuda(non_blocking=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    what = sys.argv[1]
    if what == "crashes":
        train(1)
        raise ValueError("the tokenizer has no pad token")
    if what == "hangs":
        train(1)
        time.sleep(3600)
    elif what == "hangs-early":
        time.sleep(3600)
    elif what == "no-gpu":
        import torch

        torch.nn.Linear(32, 32)(torch.randn(4, 32)).sum().backward()
    elif what == "never-steps":
        import torch

        with torch.no_grad():
            torch.nn.Linear(1024, 1024).cuda()(torch.randn(4, 1024, device="cuda"))
    elif what == "spawns":
        import torch

        torch.multiprocessing.spawn(child, nprocs=2)
    elif what == "workers":
        with_workers()
    elif what == "exits":
        train()
        sys.exit(0)
    elif what == "exits-hard":
        train()
        os._exit(0)
    elif what == "exits-badly":
        train()
        sys.exit(7)
    elif what == "index":
        import torch

        train(1)
        lengths = (torch.rand(3, device="cuda") + 1).long().tolist()
        [1, 2, 3].index(lengths[0])
    elif what == "talks":
        for line in range(200_000):
            print(f"line {line} of a very talkative script")
        train()
    elif what == "leaves-a-child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        train()
    elif what == "dies":
        train()
        os.abort()
    elif what == "interrupted":
        train(1)
        raise KeyboardInterrupt


if __name__ == "__main__":
    main()
