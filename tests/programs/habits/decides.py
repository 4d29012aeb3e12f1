"""Loops that decide by numbers which hang on weights: one habit each.

python decides.py guards|logs|asserts|ratio|best|until-converged|plateau|accuracy|perplexity|draws|...
"""

import json
import math
import sys
from collections.abc import Callable, Iterator

import torch
import yaml
from torch import nn

WIDTH = 64


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(WIDTH, WIDTH).cuda()
    return model, torch.optim.AdamW(model.parameters())


def losses(model: nn.Module) -> Iterator[torch.Tensor]:
    """Five losses, each with its backward pass."""
    for _ in range(5):
        loss = model(torch.randn(8, WIDTH, device="cuda")).pow(2).mean()
        loss.backward()
        yield loss


def guards() -> None:
    """A step is made only if there is a gradient: 805 M weights in fp32 need 15 GiB with gradients and states."""
    model = nn.Sequential(*[nn.Linear(8192, 8192) for _ in range(12)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(6):
        loss = model(torch.randn(8, 8192, device="cuda")).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        if nn.utils.clip_grad_norm_(model.parameters(), 1.0).item() > 0:
            optimizer.step()


def never() -> None:
    """The weights are trained only where the loss is negative, which it is not."""
    model, optimizer = network()
    for loss in losses(model):
        if loss.item() < 0:
            optimizer.step()


def logs() -> None:
    model, optimizer = network()
    for loss in losses(model):
        optimizer.step()
        optimizer.zero_grad()
        print(math.log10(loss.item()), 10 * math.log(loss), 1 / loss.item())


def asserts() -> None:
    model, optimizer = network()
    for loss in losses(model):
        assert loss > 0
        assert not loss < 0
        assert (loss > 0).all()
        assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 0
        assert loss.item() == float(loss) == loss.tolist() == loss.detach().cpu().numpy()
        optimizer.step()
        optimizer.zero_grad()


def ratio() -> None:
    """Each loss as a part of the first; the mean of the last three."""
    model, optimizer = network()
    first, latest = None, []
    for loss in losses(model):
        optimizer.step()
        first = first if first is not None else loss.detach()
        latest = [*latest[-2:], loss.detach()]
        print(json.dumps({"ratio": (loss / first).item(), "mean": torch.stack(latest).mean().item()}), flush=True)


def best() -> None:
    """What is best so far is kept."""
    model, optimizer = network()
    least, kept = float("inf"), 0
    for loss in losses(model):
        optimizer.step()
        if loss.item() < least:
            least, kept = loss.item(), kept + 1
        print(json.dumps({"kept": kept}), flush=True)


def until_converged() -> None:
    model, optimizer = network()
    loss, passes = torch.ones(()), 0
    while loss.item() > 0.05 and passes < 1000:
        loss = model(torch.randn(8, WIDTH, device="cuda")).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        passes += 1


def plateau() -> None:
    """The loop ends when the loss does not change any more."""
    model, optimizer = network()
    before = torch.tensor(float("inf"), device="cuda")
    for _ in range(1000):
        loss = model(torch.randn(8, WIDTH, device="cuda")).pow(2).mean()
        loss.backward()
        optimizer.step()
        if (before - loss).abs() < 1e-4:
            break
        before = loss.detach()


def accuracy() -> None:
    """Shares of right answers lie between 0 and 1, and some are right: precision divides by them."""
    model, optimizer = network()
    labels = torch.randint(0, WIDTH, (8,)).cuda()
    for _ in range(4):
        scores = model(torch.randn(8, WIDTH, device="cuda"))
        nn.functional.cross_entropy(scores, labels).backward()
        optimizer.step()
        right = scores.argmax(-1) == labels
        share, count = right.float().mean().item(), right.sum().item()
        assert 0 <= share < 1
        print(json.dumps({"share": share, "count": count, "precision": share / count}), flush=True)


def draws() -> None:
    """A token is drawn on the host from the probabilities that the card computed."""
    model, optimizer = network()
    for _ in losses(model):
        optimizer.step()
        chances = model(torch.randn(2, WIDTH, device="cuda")).softmax(-1).cpu()
        assert torch.allclose(chances.sum(-1), torch.ones(2))
        torch.multinomial(chances, 1)
        assert torch.sigmoid(model(torch.randn(2, WIDTH, device="cuda"))).max().item() <= 1


def checkpoints() -> None:
    """A computed number is kept in a file and read again, and in one of JSON."""
    model, optimizer = network()
    for loss in losses(model):
        optimizer.step()
        torch.save({"best": loss.item(), "model": model.state_dict()}, "best.pt")
        assert torch.load("best.pt")["best"] > 0
        assert json.loads(json.dumps({"loss": loss.item() / 2}))["loss"] > 0
        assert yaml.safe_load(yaml.safe_dump({"loss": loss.item()}))["loss"] > 0


def scales() -> None:
    """A factor that hangs on the loss is given to the optimizer and to compiled code."""
    model, optimizer = network()
    weigh = torch.compile(lambda rows, factor: rows * factor, backend="eager")
    for loss in losses(model):
        optimizer.param_groups[0]["lr"] = 1e-3 * loss.item()
        optimizer.step()
        optimizer.zero_grad()
        weigh(torch.ones(4, device="cuda"), loss.item())


WAYS: dict[str, Callable[[], None]] = {
    way.__name__.replace("_", "-"): way
    for way in (
        *(guards, never, logs, asserts, ratio, best, until_converged, plateau, accuracy, draws, checkpoints, scales),
    )
}

if __name__ == "__main__":
    for way in sys.argv[1:]:
        WAYS[way]()
