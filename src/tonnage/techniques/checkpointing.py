"""Activation checkpointing: layers keep their inputs only and run again in backward.

`full`: every layer; `every-N`: layers 0, N, 2N, ...; `selective`: every layer, but the results of matrix products and
attention (SAVED_OPS) are kept, so that only the cheap rest runs again.  Always non-reentrant.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tonnage.errors import CannotEstimate
from tonnage.techniques.technique import Technique

if TYPE_CHECKING:
    from torch import nn

    from tonnage.step import Step

SAVED_OPS: Final = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "linear",
    "_grouped_mm",
    "_scaled_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
"""What `selective` keeps, by names in torch.ops.aten (`linear` appears there from some version on)."""


def apply(step: Step) -> Step:
    """Checkpoint the layers, after adapters are in place."""
    return replace(step, changes=(*step.changes, partial(_checkpointed, choice=step.plan.checkpointing)))


def _checkpointed(module: nn.Module, choice: str) -> nn.Module:
    from tonnage.model import hugging_face

    every = int(choice.removeprefix("every-")) if choice.startswith("every-") else 1
    arguments: dict[str, Any] = {"use_reentrant": False}
    if choice == "selective":
        arguments["context_fn"] = _selective_contexts()
    network = hugging_face(module)
    if network is not None and network.supports_gradient_checkpointing:
        _ask_transformers(network, arguments, every)
    else:
        _wrap_forwards(module, arguments, every)
    return module


def _selective_contexts() -> Any:
    import torch
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    known = [getattr(torch.ops.aten, name) for name in SAVED_OPS if hasattr(torch.ops.aten, name)]
    ops = [packet.default for packet in known if "default" in packet.overloads()]
    return partial(create_selective_checkpoint_contexts, ops)


def _ask_transformers(network: Any, arguments: dict[str, Any], every: int) -> None:
    """transformers 5.23 renamed gradient to activation checkpointing; both names mean the same code."""
    if hasattr(network, "activation_checkpointing_enable"):
        network.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments, every_n_layers=every)
        return
    enable = network.gradient_checkpointing_enable
    if every == 1:
        enable(gradient_checkpointing_kwargs=arguments)
    elif "every_n_layers" in inspect.signature(enable).parameters:
        enable(gradient_checkpointing_kwargs=arguments, every_n_layers=every)
    else:
        raise _cannot_choose_layers(every)


def _cannot_choose_layers(every: int) -> CannotEstimate:
    import transformers

    return CannotEstimate(
        f"transformers {transformers.__version__} checkpoints all layers or none, not every-{every}; "
        "choose checkpointing full, or upgrade transformers."
    )


def _wrap_forwards(module: nn.Module, arguments: dict[str, Any], every: int) -> None:
    from torch.utils.checkpoint import checkpoint

    from tonnage.model import layer_lists

    found = layer_lists(module)
    if not found:
        raise CannotEstimate(
            f"{type(module).__name__} has no ModuleList of equal layers to checkpoint; choose checkpointing none."
        )
    for layers in found:
        for layer in layers[::every]:
            layer.forward = partial(checkpoint, layer.forward, **arguments)  # type: ignore[method-assign]


CHECKPOINTING: Final = Technique(option="checkpointing", values=("full", "every-N", "selective"), apply=apply)
