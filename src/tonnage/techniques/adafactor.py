"""Adafactor as torch implements it: a row and a column of second moments instead of a full matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tonnage.mesh import SHARDING
from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from tonnage.case import Case
    from tonnage.step.step import Step


def accepts(case: Case) -> Refusal | None:
    """torch's Adafactor does not work on the sharded tensors of FSDP2."""
    if case.plan.shard in SHARDING:
        return Refusal(
            technique="optimizer=adafactor",
            reason="torch.optim.Adafactor fails on FSDP2's sharded parameters",
            instead="choose shard none, ddp or zero1, or optimizer adamw",
        )
    return None


def apply(step: Step) -> Step:
    """One Adafactor over all trainable parameters."""
    import torch

    from tonnage.step.step import trainable

    def new(parameters: list[nn.Parameter]) -> Optimizer:
        return torch.optim.Adafactor(parameters)

    return replace(step, optimizer_parts=lambda module: ((trainable(module), new),))


ADAFACTOR: Final = Technique(option="optimizer", values=("adafactor",), accepts=accepts, apply=apply)
