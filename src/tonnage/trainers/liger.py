"""Liger's kernels for a whole network, as trainers apply them: norms, rotations, activations, the loss in slices."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tonnage.errors import CannotEstimate
from tonnage.techniques.technique import Refusal
from tonnage.trainers.packages import find_version

if TYPE_CHECKING:
    from torch import nn

    from tonnage.plans import Plan


def refuse_missing_liger(plan: Plan) -> Refusal | None:
    """Return the refusal of Liger's loss where its package is not installed."""
    if plan.loss != "liger" or find_version("liger-kernel") is not None:
        return None
    return Refusal(
        technique=f"loss={plan.loss}",
        reason="the package liger-kernel is not installed",
        instead="pip install liger-kernel, or choose loss plain",
    )


def check_liger(module: nn.Module) -> None:
    """Raise CannotEstimate where Liger would leave the network as it is, with a line in the log."""
    from tonnage.step.model import hugging_face

    known = import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    network = hugging_face(module)
    kind = "a factory's network" if network is None else network.config.model_type
    if kind not in known:
        raise CannotEstimate(
            f"Liger has no kernels for {kind}, and the Trainer would go on without; choose loss plain."
        )


def apply_liger(module: nn.Module) -> None:
    """Exchange the kernels of a network, as transformers' Trainer does with `use_liger_kernel`."""
    from tonnage.step.model import hugging_face

    check_liger(module)
    import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance(model=hugging_face(module))
