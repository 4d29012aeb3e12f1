"""Activation checkpointing: layers keep their inputs only and run again in backward.

`full`: every layer; `every-N`: layers 0, N, 2N, ...; `selective`: every layer, but the results of matrix products and
attention (SAVED_OPS) are kept, so that only cheap operations run again; `attention-module`: of every layer only its
attention modules, projections included.  Non-reentrant, as transformers 5 and FSDP2 need it; `full-reentrant` is
`full` in torch's older way, whose forward records no graph and which recomputes layers to their end.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tonnage.errors import CannotEstimate
from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    from torch import nn

    from tonnage.case import Case
    from tonnage.step.step import Step

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
"""Operations that `selective` keeps, by names in torch.ops.aten (`linear` appears there from some version on)."""


def accepts(case: Case) -> Refusal | None:
    """Refuse reentrant checkpointing of frozen layers: it needs an input with a gradient."""
    if case.plan.checkpointing == "full-reentrant" and (
        case.job.method != "full" or case.job.model.kind == "factory"
    ):
        return Refusal(
            technique="checkpointing=full-reentrant",
            reason="it gives no gradients to layers whose inputs need none, such as those behind frozen embeddings",
            instead="choose checkpointing full",
        )
    return None


def apply(step: Step) -> Step:
    """Checkpoint the layers, after adapters are in place."""
    return replace(step, changes=(*step.changes, partial(_checkpoint_layers, choice=step.plan.checkpointing)))


def _checkpoint_layers(module: nn.Module, choice: str) -> nn.Module:
    from tonnage.step.model import hugging_face

    if choice == "attention-module":
        wrap(attention_modules(module), {"use_reentrant": False})
        return module
    every = int(choice.removeprefix("every-")) if choice.startswith("every-") else 1
    arguments: dict[str, Any] = {"use_reentrant": choice == "full-reentrant"}
    if choice == "selective":
        arguments["context_fn"] = selective_contexts(module)
    network = hugging_face(module)
    if network is not None and network.supports_gradient_checkpointing:
        _enable_in_transformers(network, arguments, every)
    else:
        for layers in layer_lists_of(module):
            wrap(layers[::every], arguments)
    return module


def selective_contexts(module: nn.Module) -> Any:
    """Return the `context_fn` that keeps the results of a network's `saved_ops`."""
    from torch.utils import checkpoint

    # FSDP2 records profiler events, and more of them when a module inside the layer (experts of their own mesh) runs
    # again; torch 2.13 takes an event that was not there the first time for another computation.
    getattr(checkpoint, "SAC_IGNORED_OPS", set()).update(_profiler_ops())
    return partial(checkpoint.create_selective_checkpoint_contexts, saved_ops(module))


def _profiler_ops() -> Iterator[Any]:
    import torch

    for name in ("_record_function_enter", "_record_function_enter_new", "_record_function_exit"):
        packet = getattr(torch.ops.profiler, name)
        yield from (getattr(packet, overload) for overload in packet.overloads())


def saved_ops(module: nn.Module) -> list[Any]:
    """Return SAVED_OPS as this version of torch has them.

    Products of experts with a bias are left out: transformers adds the bias in place, and what is kept must not
    change.
    """
    import torch

    names = [name for name in SAVED_OPS if name != "_grouped_mm" or not _adds_bias_in_place(module)]
    known = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    return [packet.default for packet in known if "default" in packet.overloads()]


def _adds_bias_in_place(module: nn.Module) -> bool:
    return any(getattr(part, "has_bias", False) is True for part in module.modules())


def _enable_in_transformers(network: Any, arguments: dict[str, Any], every: int) -> None:
    """Enable it in transformers; 5.23 renamed gradient to activation checkpointing, for the same code."""
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


def wrap(modules: Sequence[nn.Module], arguments: dict[str, Any]) -> None:
    """Run the forward of each module under torch's `checkpoint` with these arguments."""
    for module in modules:
        module.forward = partial(run, module.forward, arguments)  # type: ignore[method-assign]


def run(forward: Any, arguments: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Return what a forward returns, under torch's `checkpoint`, whose reentrant way takes no inputs by name."""
    from torch.utils.checkpoint import checkpoint

    return checkpoint(partial(forward, **kwargs), *args, **arguments)


def layer_lists_of(module: nn.Module) -> list[list[nn.Module]]:
    """Return the lists of repeated layers.  Raises CannotEstimate if there are none."""
    from tonnage.step.model import layer_lists

    lists = layer_lists(module)
    if not lists:
        raise CannotEstimate(
            f"{type(module).__name__} has no ModuleList of equal layers to checkpoint; choose checkpointing none."
        )
    return lists


def attention_modules(module: nn.Module) -> list[nn.Module]:
    """Return the outermost modules inside the layers whose class is called ...Attention, as in transformers and
    torch.
    """
    modules = [part for layers in layer_lists_of(module) for layer in layers for part in _outermost_attention(layer)]
    if not modules:
        raise CannotEstimate(
            f"No module inside the layers of {type(module).__name__} has a class named ...Attention; "
            "choose checkpointing selective."
        )
    return modules


def _outermost_attention(module: nn.Module) -> list[nn.Module]:
    if type(module).__name__.endswith("Attention"):
        return [module]
    return [part for child in module.children() for part in _outermost_attention(child)]


CHECKPOINTING: Final = Technique(
    option="checkpointing",
    values=("full", "full-reentrant", "every-N", "selective", "attention-module"),
    accepts=accepts,
    apply=apply,
)
