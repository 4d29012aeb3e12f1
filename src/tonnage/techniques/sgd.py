"""SGD with momentum 0.9: one buffer of the parameters' dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tonnage.techniques.technique import Technique

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from tonnage.step.step import Step


def apply(step: Step) -> Step:
    """One SGD over all trainable parameters."""
    import torch

    from tonnage.step.step import trainable

    def new(parameters: list[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)

    return replace(step, optimizer_parts=lambda module: ((trainable(module), new),))


SGD: Final = Technique(option="optimizer", values=("sgd",), apply=apply)
