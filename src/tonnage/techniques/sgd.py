"""SGD with momentum 0.9, one buffer of the parameters' dtype; `sgd-plain` is torch's default, which keeps nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tonnage.techniques.technique import Technique

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from tonnage.step.step import Step


MOMENTUM: Final = {"sgd": 0.9, "sgd-plain": 0.0}


def apply(step: Step) -> Step:
    """One SGD over all trainable parameters."""
    import torch

    from tonnage.step.step import trainable

    momentum = MOMENTUM[step.plan.optimizer]

    def new(parameters: list[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=1e-3, momentum=momentum)

    return replace(step, optimizer_parts=lambda module: ((trainable(module), new),))


SGD: Final = Technique(option="optimizer", values=tuple(MOMENTUM), apply=apply)
