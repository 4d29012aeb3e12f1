"""Weights that no optimizer's step updates: by hand, or in backward by one that has no step; without an end."""

import sys
from typing import Any

import torch
from torch import nn


class InBackward(torch.optim.Optimizer):
    """Each weight is updated as soon as its gradient is there, which is then gone (LOMO)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(updated)


@torch.no_grad()
def updated(parameter: torch.Tensor) -> None:
    """One weight's descent."""
    assert parameter.grad is not None
    parameter.sub_(parameter.grad, alpha=0.1)
    parameter.grad = None


def main() -> None:
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).cuda()
    how = InBackward(model.parameters()) if sys.argv[1] == "in-backward" else None
    while True:
        model(torch.randn(64, 256, device="cuda")).square().mean().backward()
        for parameter in model.parameters() if how is None else ():
            updated(parameter)


if __name__ == "__main__":
    main()
