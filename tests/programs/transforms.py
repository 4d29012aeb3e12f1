"""Gradients of each example by torch.func, clipped one by one, as private training has them."""

import json

import torch
from torch import nn
from torch.func import functional_call, grad, vmap


def main() -> None:
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0))
    for _ in range(3):
        x, y = torch.randn(64, 512, device="cuda"), torch.randint(0, 10, (64,), device="cuda")
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        gradients = each(parameters, x, y)
        norms = torch.stack([value.flatten(1).norm(dim=1) for value in gradients.values()]).norm(dim=0)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.einsum("i...,i->...", gradients[name], (1 / norms).clamp(max=1)) / 64
        optimizer.step()
        optimizer.zero_grad()
    print(json.dumps({"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}))


if __name__ == "__main__":
    main()
