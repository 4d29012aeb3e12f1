"""A loop of which one step more is made than was asked for: what becomes of that one."""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

STEPS = 3
LAST_STEP = {"ends": 3, "evaluates": 4, "evaluates-soon": 3, "evaluates-with-graph": 3, "copies": 4, "runs-once": 4}
"""The steps of loops that end."""


def widen() -> None:
    """Two matrices of 16 bits multiplied and added up in 32, as TRL's loss does."""
    factor, total = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16), torch.zeros(64, 64, device="cuda")
    torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)


def fetch_ahead(loader: DataLoader[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield each batch once the next one is there, as accelerate does to know the last one."""
    batches = iter(loader)
    ready = next(batches)
    for following in batches:
        yield ready
        ready = following
    yield ready


def fetches_ahead() -> None:
    """Two epochs of four steps: what comes behind the fourth is asked for before it is made."""
    model = nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(torch.randn(32, 1024), batch_size=8)  # type: ignore[arg-type]
    for _ in range(2):
        for rows in fetch_ahead(loader):
            model(rows.cuda()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def main() -> Any:
    how = sys.argv[1]
    if how == "fetches-ahead":
        return fetches_ahead()
    model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).cuda()
    run: Any = torch.compile(model) if how == "compiled" else model
    optimizer = torch.optim.AdamW(model.parameters())
    step = 0
    if how == "runs-once":
        Path(sys.argv[2]).mkdir()
    while how not in LAST_STEP or step < LAST_STEP[how]:
        if how == "fails" and step == STEPS:
            run = nn.Sequential(model, nn.Linear(7, 7).cuda())
        if how == "gives-up" and step == STEPS:
            model(torch.randn(8, 1024, device="cuda"))
            sys.exit(3)
        with FlopCounterMode(display=False) if how == "counts" else nullcontext():
            found = run(torch.randn(512, 1024, device="cuda"))
            if how == "chooses":  # by numbers that are known, which are computed on the host
                labels = torch.arange(512, device="cuda")
                found = found.gather(1, (labels[labels > 127] % 1024)[:, None].expand(-1, 4))
                margins = torch.zeros(4, device="cuda", requires_grad=True)
                nn.functional.logsigmoid(margins).sum().backward()  # whose backward takes other tensors on the host
            loss = found.square().mean()
            if how in ("sums", "evaluates"):  # two gradients of one tensor, which are added up in place
                loss = loss + run(found + torch.randn(512, 1024, device="cuda")).square().mean()
            loss.backward()
        if how == "widens":
            widen()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    if how.startswith("evaluates") or how == "runs-once":
        with nullcontext() if how == "evaluates-with-graph" else torch.no_grad():
            model(torch.randn(2**15, 1024, device="cuda"))
    if how == "copies":
        return [torch.cat([each.flatten() for each in model.parameters()]) for _ in range(20)]


if __name__ == "__main__":
    main()
