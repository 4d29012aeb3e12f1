"""Muon on the matrices of the layers, AdamW on everything else (embeddings, head, norms, 3-D expert weights).

torch.optim.Muon (since 2.9) takes 2-D parameters only; its one state is a momentum buffer of the parameter's dtype.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from tonnage.techniques.optimizers import maker
from tonnage.techniques.technique import Technique

if TYPE_CHECKING:
    from torch import nn

    from tonnage.step.step import OptimizerPart, Step


def apply(step: Step) -> Step:
    """Return the step with two optimizers; the AdamW of the rest is torch's default implementation."""
    import torch

    from tonnage.errors import CannotEstimate

    if not hasattr(torch.optim, "Muon"):
        raise CannotEstimate(f"torch {torch.__version__} has no Muon (2.9 and newer have); choose optimizer adamw.")
    return replace(step, optimizer_parts=partial(_parts, step=step))


def _parts(module: nn.Module, step: Step) -> tuple[OptimizerPart, ...]:
    """Return the parameters of each optimizer with what makes it; a part without parameters is left out."""
    from tonnage.step.model import layers
    from tonnage.step.step import trainable

    in_layers = {id(p) for layer in layers(module) for p in layer.parameters() if p.ndim == 2}
    matrices = [p for p in trainable(module) if id(p) in in_layers]
    rest = [p for p in trainable(module) if id(p) not in in_layers]
    parts = (
        (matrices, maker(step, "muon")),
        (rest, maker(step, "adamw")),
    )
    return tuple(part for part in parts if part[0])


MUON: Final = Technique(option="optimizer", values=("muon",), apply=apply)
