"""Programs with several optimizers, or whose networks are not called as modules are: one way each.

python several.py critics|rarely|raw|forward|compiled|descends|searches|penalty
"""

import json
import sys
from collections.abc import Callable

import torch
from torch import nn

WIDTH = 256


def critics(turns: Callable[[int], bool]) -> None:
    """A critic that steps each time, and a generator that steps where it is its turn."""
    generator, critic = nn.Linear(WIDTH, 4 * WIDTH).cuda(), nn.Linear(4 * WIDTH, 1).cuda()
    first = torch.optim.Adam(generator.parameters())
    second = torch.optim.SGD(critic.parameters(), lr=0.1)
    for step in range(60):
        made = generator(torch.randn(64, WIDTH, device="cuda"))
        critic(made.detach()).mean().backward()
        second.step()
        if turns(step):
            critic(made).mean().backward()
            first.step()
        print(json.dumps({"step": step}), flush=True)


def raw() -> None:
    """Tensors that no module owns."""
    table = torch.randn(1000, WIDTH, device="cuda", requires_grad=True)
    weight = torch.randn(WIDTH, 4 * WIDTH, device="cuda", requires_grad=True)
    optimizer = torch.optim.Adam([table, weight])
    for _ in range(4):
        words = torch.randint(0, 1000, (512,)).cuda()
        torch.tanh(table[words] @ weight).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH))
        self.register_buffer("scale", torch.ones(4 * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight * self.scale)


def train(network: nn.Module, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    optimizer = torch.optim.Adam(network.parameters())
    for _ in range(4):
        call(torch.randn(512, WIDTH, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def descend(search: str | None) -> None:
    """L-BFGS remembers ten steps, of which it makes five at a time."""
    network = Network().cuda()
    optimizer = torch.optim.LBFGS(network.parameters(), max_iter=5, history_size=10, line_search_fn=search)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = network(torch.randn(64, WIDTH, device="cuda")).square().mean()
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(closure)
    print(json.dumps({"tolerance": optimizer.param_groups[0]["tolerance_grad"]}), flush=True)


def penalize() -> None:
    """A loss on the gradient of the network with respect to its input."""
    network = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, 1)).cuda()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(4):
        x = torch.randn(4096, WIDTH, device="cuda", requires_grad=True)
        (slope,) = torch.autograd.grad(network(x).sum(), x, create_graph=True)
        (slope.square().sum(1) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    what = sys.argv[1]
    if what == "critics":
        critics(lambda step: step % 5 == 4)
    elif what == "rarely":
        critics(lambda step: step == 50)
    elif what == "raw":
        raw()
    elif what == "forward":
        network = Network().cuda()
        train(network, network.forward)
    elif what == "compiled":
        network = Network().cuda()
        network.compile(backend="eager")
        train(network, network)
    elif what in ("descends", "searches"):
        descend("strong_wolfe" if what == "searches" else None)
    elif what == "penalty":
        penalize()
    else:
        raise SystemExit(f"unknown: {what}")


if __name__ == "__main__":
    main()
