"""Programs that go on behind their training loops, or have several of them.

python ends.py WAY, such as cleans-up: the name of a function below
"""

import atexit
import concurrent.futures
import json
import os
import sys
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 64


def say(**what: object) -> None:
    os.write(1, (json.dumps(what) + "\n").encode())


def network(width: int = WIDTH) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(WIDTH, width), nn.ReLU(), nn.Linear(width, WIDTH)).cuda()
    return model, torch.optim.AdamW(model.parameters())


def loader(rows: int = 800) -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.randn(rows, WIDTH)), batch_size=8)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
    model(rows).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[tuple[torch.Tensor, ...]]) -> int:
    count = 0
    for (rows,) in batches:
        step(model, optimizer, rows.cuda())
        count += 1
    return count


def random_rows() -> torch.Tensor:
    return torch.randn(8, WIDTH, device="cuda")


def cleans_up() -> None:
    """What is to be done at the end is done."""
    atexit.register(say, done="atexit")
    model, optimizer = network()
    try:
        for _ in range(10):
            step(model, optimizer, random_rows())
    finally:
        say(done="finally")


def sweeps() -> None:
    """Three widths, the largest last: its weights, gradients and states take 27 GiB."""
    for width in (256, 1024, 2**24):
        model, optimizer = network(width)
        for _ in range(5):
            step(model, optimizer, random_rows())
        say(width=width)


def unfreezes() -> None:
    """The head alone, then everything, with the same loader and an optimizer for each."""
    model = nn.Sequential(nn.Linear(WIDTH, 2**16), nn.Linear(2**16, WIDTH), nn.Linear(WIDTH, WIDTH)).cuda()
    batches = loader()
    for trained in (model[-1], model):
        for parameter in model.parameters():
            parameter.requires_grad = False
        for parameter in trained.parameters():
            parameter.requires_grad = True
        say(count=train(model, torch.optim.AdamW(trained.parameters()), batches))


def warms_up() -> None:
    """Two steps of a small network come before many of a large one."""
    for width, rows in ((WIDTH, 16), (2**16, 800)):
        model, optimizer = network(width)
        say(count=train(model, optimizer, loader(rows)))


def renews() -> None:
    """Forty steps, each with an optimizer of its own."""
    model, _ = network()
    for (rows,) in loader(320):
        step(model, torch.optim.AdamW(model.parameters()), rows.cuda())


def reloads() -> None:
    """Forty epochs, each with a loader of its own."""
    model, optimizer = network()
    say(count=sum(train(model, optimizer, loader(80)) for _ in range(40)))


def epochs() -> None:
    """Three epochs, with an evaluation after each and a mean over its batches, then the weights are saved."""
    model, optimizer = network()
    batches, others = loader(), loader(400)
    for epoch in range(3):
        count = train(model, optimizer, batches)
        with torch.no_grad():
            evaluated = sum(len(model(torch.cat([rows.cuda()] * 2**13))) > 0 for (rows,) in others)
        say(epoch=epoch, count=count, mean=1 / count, evaluated=evaluated)
    torch.save(model.state_dict(), "ends.pt")
    say(saved=True)


def endless() -> None:
    """A loop without a loader and without an end."""
    model, optimizer = network()
    try:
        while True:
            try:
                step(model, optimizer, random_rows())
            except Exception:
                say(caught=True)
    finally:
        say(unwound=True)


def catches_all() -> None:
    """A loop without an end from which nothing gets out."""
    model, optimizer = network()
    while True:
        try:
            step(model, optimizer, random_rows())
        except BaseException as error:
            say(caught=type(error).__name__)


def fails_later() -> None:
    model, optimizer = network()
    train(model, optimizer, loader())
    raise ValueError("the results have no name")


def evaluates() -> None:
    """The evaluation after the training needs more than that: 2**21 rows of 64 numbers, in fp32 several times."""
    model, optimizer = network()
    train(model, optimizer, loader())
    with torch.no_grad():
        model(torch.zeros(2**25, WIDTH, device="cuda"))
    say(evaluated=True)


def looks_first() -> None:
    """One batch is evaluated before the training, and all of them behind it, where there are gradients and states."""
    model, optimizer = network(2**13)
    rows = torch.randn(2**13, WIDTH, device="cuda")
    with torch.no_grad():
        model(rows)
    for (batch,) in loader():
        optimizer.zero_grad()
        model(batch.cuda()).pow(2).mean().backward()
        optimizer.step()
    with torch.no_grad():
        model(rows)
    say(allocated=torch.cuda.max_memory_allocated())


def keeps() -> None:
    """The predictions of all batches, 2 MiB each, stay on the card until a metric is computed from them."""
    model, optimizer = network()
    train(model, optimizer, loader())
    with torch.no_grad():
        for count in (20, 200):
            kept = [model(torch.cat([rows.cuda()] * 2**10)) for (rows,) in loader(8 * count)]
            say(count=len(kept))
            del kept


def accumulates() -> None:
    """Losses are added up with their graphs, which hold 2 MiB of activations each."""
    model, optimizer = network(2**15)
    total = torch.zeros((), device="cuda")
    for (rows,) in loader():
        optimizer.zero_grad()
        loss = model(rows.cuda()).pow(2).mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        total = total + loss


def lengthens() -> None:
    """Batches from 2**13 rows on, each 2**11 longer than the one before."""
    model, optimizer = network()
    lengths = [2**11 * length for length in range(4, 44)]
    for rows in DataLoader([torch.randn(length, WIDTH) for length in lengths], batch_size=None):  # type: ignore[arg-type]
        step(model, optimizer, rows.cuda())


def work(rank: int, results: "torch.multiprocessing.SimpleQueue") -> None:  # type: ignore[name-defined]
    torch.cuda.set_device(rank)
    model, optimizer = network()
    results.put(train(model, optimizer, loader()))


def queue() -> None:
    """The parent waits for the results of its children."""
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(work, args=(results,), nprocs=2)  # type: ignore[no-untyped-call]
    say(counts=[results.get(), results.get()])


def fit(width: int) -> float:
    model, optimizer = network(width)
    for _ in range(10**6):
        step(model, optimizer, random_rows())
    return float(width)


def pool() -> None:
    """A parent that waits for what its workers return; the second network does not fit."""
    spawning = torch.multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawning) as workers:
        for width in workers.map(fit, (WIDTH, 2**24)):
            say(width=width)


def first_stage() -> None:
    model, optimizer = network()
    train(model, optimizer, loader())
    torch.save(model.state_dict(), "stage.pt")


def second_stage() -> None:
    model, optimizer = network()
    model.load_state_dict(torch.load("stage.pt"))
    say(count=train(model, optimizer, loader()))


WAYS: dict[str, Callable[[], None]] = {
    way.__name__.replace("_", "-"): way
    for way in (
        *(cleans_up, sweeps, unfreezes, warms_up, renews, reloads, epochs),
        *(endless, catches_all, fails_later, evaluates, queue, pool, first_stage),
        *(second_stage, looks_first, keeps, accumulates, lengthens),
    )
}

if __name__ == "__main__":
    WAYS[sys.argv[1]]()
