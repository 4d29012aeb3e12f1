"""AdamW as torch implements it: `adamw` is its default, the suffixes force one implementation.

On CUDA the default is foreach, whose temporaries at the step can be as large as all parameters together; the
loop's are those of one parameter, the fused kernel has none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tonnage.techniques.technique import Technique

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from tonnage.step.step import Step

IMPLEMENTATIONS: Final[dict[str, dict[str, bool]]] = {
    "adamw": {},
    "adamw-loop": {"foreach": False, "fused": False},
    "adamw-foreach": {"foreach": True},
    "adamw-fused": {"fused": True},
}


def apply(step: Step) -> Step:
    """One AdamW over all trainable parameters."""
    import torch

    from tonnage.step.step import trainable

    chosen = IMPLEMENTATIONS[step.plan.optimizer]

    def new(parameters: list[nn.Parameter]) -> Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-4, **chosen)

    return replace(step, optimizer_parts=lambda module: ((trainable(module), new),))


ADAMW: Final = Technique(option="optimizer", values=tuple(IMPLEMENTATIONS), apply=apply)
