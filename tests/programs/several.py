"""Programs with several optimizers, or whose networks are not called as modules are: one way each.

python several.py critics|rarely|raw|forward|compiled|descends|searches|penalty|keras|copies|masters
python several.py scaled FOLDER
"""

import copy
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

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


def of_keras() -> None:
    """An optimizer that is not torch's."""
    sys.path.insert(0, str(Path(__file__).parent / "like"))
    from keras.src.optimizers.base_optimizer import BaseOptimizer, Variable

    network = Network().cuda()
    variable, optimizer = Variable(torch.empty(0)), BaseOptimizer()
    variable.value = network.weight
    for step in range(20):
        network.zero_grad()
        network(torch.randn(64, WIDTH, device="cuda")).sum().backward()
        with torch.no_grad():
            optimizer.apply([network.weight.grad], [variable])
        print(json.dumps({"step": step}), flush=True)


def keep_copies() -> None:
    """A running mean of the weights as a network that is not called, and one as a list."""
    network = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)).cuda()
    mean = copy.deepcopy(network)
    means = [parameter.clone().detach() for parameter in network.parameters()]
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(4):
        network(torch.randn(64, WIDTH, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for kept in ([*mean.parameters()], means):
                torch._foreach_lerp_(kept, [*network.parameters()], 0.1)


def step_masters() -> None:
    """fp32 weights in one tensor beside bf16 ones, stepped once before a network is called, to make their states.

    As DeepSpeed does it without ZeRO.
    """
    network = nn.Linear(WIDTH, 4 * WIDTH, bias=False).cuda().bfloat16()
    master = network.weight.detach().float().flatten().requires_grad_()
    master.grad = torch.zeros_like(master)
    optimizer = torch.optim.SGD([master], lr=0.1, momentum=0.9)
    optimizer.step()
    for _ in range(4):
        network(torch.randn(64, WIDTH, device="cuda").bfloat16()).sum().backward()
        master.grad = network.weight.grad.float().flatten()
        network.weight.grad = None
        optimizer.step()
        network.weight.data.copy_(master.detach().view_as(network.weight))


def scale(folder: str) -> None:
    """With a scaler for losses, and a folder of its own for kernels that are compiled."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TRITON_CACHE_DIR"] = folder
    from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

    print(json.dumps({"places": [cache_dir(), triton_cache_dir(0)]}), flush=True)
    network, scaler = Network().cuda(), torch.amp.GradScaler("cuda")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(2):
        scaler.scale(network(torch.randn(64, WIDTH, device="cuda")).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        print(json.dumps({"scale": scaler.get_scale()}), flush=True)


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
    elif what == "keras":
        of_keras()
    elif what == "copies":
        keep_copies()
    elif what == "masters":
        step_masters()
    elif what == "scaled":
        scale(sys.argv[2])
    else:
        raise SystemExit(f"unknown: {what}")


if __name__ == "__main__":
    main()
