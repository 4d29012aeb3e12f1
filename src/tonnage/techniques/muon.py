"""Muon on the matrices of the layers, AdamW on everything else (embeddings, head, norms, 3-D expert weights).

torch.optim.Muon (since 2.9) takes 2-D parameters only; its one state is a momentum buffer of the parameter's dtype.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tonnage.techniques.technique import Technique

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from tonnage.step.step import OptimizerPart, Step


def apply(step: Step) -> Step:
    """Two optimizers; the rest's AdamW is torch's default implementation."""
    import torch

    from tonnage.errors import CannotEstimate

    if not hasattr(torch.optim, "Muon"):
        raise CannotEstimate(f"torch {torch.__version__} has no Muon (2.9 and newer have); choose optimizer adamw.")
    return replace(step, optimizer_parts=_parts)


def _parts(module: nn.Module) -> tuple[OptimizerPart, ...]:
    from tonnage.step.model import layers
    from tonnage.step.step import trainable

    hidden = {id(p) for layer in layers(module) for p in layer.parameters() if p.ndim == 2}
    matrices = [p for p in trainable(module) if id(p) in hidden]
    rest = [p for p in trainable(module) if id(p) not in hidden]
    parts = ((matrices, _muon), (rest, _adamw))
    return tuple(part for part in parts if part[0])


def _muon(parameters: list[nn.Parameter]) -> Optimizer:
    import torch

    return torch.optim.Muon(parameters, lr=1e-3)


def _adamw(parameters: list[nn.Parameter]) -> Optimizer:
    import torch

    return torch.optim.AdamW(parameters, lr=1e-4)


MUON: Final = Technique(option="optimizer", values=("muon",), apply=apply)
