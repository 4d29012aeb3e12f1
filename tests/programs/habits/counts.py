"""Loops that keep numbers on the card: counters, sizes, masks, schedules, and what overwrites them.

python counts.py samples|accumulates|schedule|tokens|masks|adam|backward|buffers|graph|kernel|compiled ...
"""

import json
import sys
from collections.abc import Callable

import torch
from torch import nn

WIDTH = 64


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(WIDTH, WIDTH).cuda()
    return model, torch.optim.AdamW(model.parameters())


def train(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(8, WIDTH, device="cuda")).pow(2).mean()
    loss.backward()
    return loss.detach()


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def samples() -> None:
    """A running sum of losses and the number of samples in it."""
    model, optimizer = network()
    for _ in range(4):
        total, count = torch.zeros((), device="cuda"), torch.zeros((), dtype=torch.long, device="cuda")
        for _ in range(2):
            total += train(model) * 8
            count += 8
        optimizer.step()
        optimizer.zero_grad()
        assert total > 0
        say(count=count.item(), mean=total.item() / count.item())


def accumulates() -> None:
    """Gradients are accumulated over four passes, which a counter on the card tells apart."""
    model, optimizer = network()
    step = torch.zeros((), dtype=torch.long, device="cuda")
    for _ in range(12):
        train(model)
        step += 1
        if step.item() % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
            say(passes=step.item())


def schedule() -> None:
    """A learning rate that is computed on the card from the number of the step."""
    model, optimizer = network()
    step = torch.ones(1, device="cuda")
    for _ in range(4):
        train(model)
        rate = torch.minimum(step / 10, torch.rsqrt(step)) * 1e-3
        optimizer.param_groups[0]["lr"] = rate.item()
        optimizer.step()
        say(rate=round(rate.item() * 1e6))
        step.add_(1)


def tokens() -> None:
    """Token ids that are put together on the card, cut and counted."""
    model, optimizer = network()
    for _ in range(4):
        train(model)
        optimizer.step()
        rows = torch.cat([torch.tensor([[1, 2, 3], [4, 5, 0]]).cuda(), torch.zeros(2, 2, dtype=torch.long).cuda()], 1)
        lengths = (rows != 0).sum(-1)
        rows = rows[:, : int(lengths.max())]
        rows[rows == 0] = -100
        say(shape=[*rows.shape], lengths=lengths.tolist(), row=rows[1].tolist())


def masks() -> None:
    """Places that are filled one after the other, until all are."""
    model, optimizer = network()
    filled, turns = torch.zeros(8, dtype=torch.bool, device="cuda"), 0
    while not filled.all():
        train(model)
        optimizer.step()
        filled[turns * 2 : turns * 2 + 2] = True
        turns += 1
    say(turns=turns, left=int((~filled).sum()))


def adam() -> None:
    """The number of the step that Adam keeps on the card if it may be captured, and an average that decays."""
    model = nn.Linear(WIDTH, WIDTH).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    decay = torch.ones((), device="cuda")
    for _ in range(3):
        train(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        decay.mul_(0.5)
    say(step=optimizer.state[model.weight]["step"].item(), decay=decay.item())


def backward() -> None:
    """A gradient that was set to zero is not zero after the next backward pass; nor is one of a loose tensor."""
    model, optimizer = network()
    loose = torch.zeros(4, device="cuda", requires_grad=True)
    for _ in range(4):
        optimizer.zero_grad(set_to_none=False)
        if loose.grad is not None:
            loose.grad.zero_()
        train(model)
        (loose * 2).sum().backward()
        assert model.bias.grad is not None
        assert loose.grad is not None
        say(norm=model.bias.grad.norm().item() > 0, loose=loose.grad[0].item() > 0)
        optimizer.step()


def buffers() -> None:
    """The batches that a normalisation has seen, and its mean, which is not zero any more."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        train(model)
        optimizer.step()
    say(seen=model[1].num_batches_tracked.item(), mean=model[1].running_mean.abs().sum().item() > 0)


def graph() -> None:
    """A counter in a CUDA graph goes on with each replay, which nobody follows: it is not told to stand still."""
    model, optimizer = network()
    for _ in range(3):
        train(model)
        optimizer.step()
    count, total = torch.zeros((), device="cuda"), torch.zeros((), device="cuda")
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        count += 1
        total.copy_(count)
    for _ in range(3):
        captured.replay()
    say(count=count.item() != 1, total=total.item() != 1)


def compiled() -> None:
    """A counter and an average that compiled code changes in place."""
    model, optimizer = network()
    count, mean = torch.zeros((), dtype=torch.long, device="cuda"), torch.zeros(4, device="cuda")

    @torch.compile(backend="aot_eager")
    def change(count: torch.Tensor, mean: torch.Tensor) -> None:
        count.add_(2)
        mean.lerp_(torch.ones_like(mean), 0.1)

    train(model)
    optimizer.step()
    for _ in range(3):
        change(count, mean)
    say(count=count.item(), mean=mean[0].item())


def kernel() -> None:
    """A counter and an average that a kernel of the program's own writes, beside numbers that it only reads."""
    import triton
    from added import add_kernel

    model, optimizer = network()
    train(model)
    optimizer.step()
    total, more = torch.zeros(4, device="cuda"), torch.ones(4, device="cuda")
    for _ in range(2):
        add_kernel[(triton.cdiv(4, 16),)](total, more, 4, BLOCK=16)
    say(total=total.tolist(), more=more.tolist())


WAYS: dict[str, Callable[[], None]] = {
    way.__name__: way
    for way in (samples, accumulates, schedule, tokens, masks, adam, backward, buffers, graph, compiled, kernel)
}

if __name__ == "__main__":
    for way in sys.argv[1:]:
        WAYS[way]()
