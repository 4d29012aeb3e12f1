"""Fused linear cross-entropy: head and loss on slices of tokens, whose gradients are already computed in forward.

All logits never exist, and nothing runs twice.  `fused`: plain torch operations, for any head; `torch`: torch's own
`linear_cross_entropy` (2.13 and newer), which chooses the slices; `liger`: Liger's Triton kernels.  The gradient of
the hidden states and that of the head's weights are kept for backward.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from types import MethodType
from typing import TYPE_CHECKING, Any, Final

from tonnage.errors import UsageError
from tonnage.job import IGNORED_LABEL
from tonnage.plans import CHUNK_TOKENS
from tonnage.techniques import chunked_loss
from tonnage.techniques.chunked_loss import CAPS, SCALINGS
from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tonnage.case import Case
    from tonnage.step.step import Step


_WIDTH_OF_SCALING: Final = "dim_model_base"
"""Field by which MiniCPM3's configuration computes how it scales its logits."""


def accepts(case: Case) -> Refusal | None:
    """Refuse like the chunked loss; `torch` and `liger` need plain linear heads."""
    plan = case.plan
    refusal = chunked_loss.accepts(case)
    if refusal is not None or plan.loss == "fused":
        return refusal
    text = case.job.model.text
    scaled = [name for name in (*SCALINGS, *CAPS, _WIDTH_OF_SCALING) if text.get(name) not in (None, 1)]
    if scaled:
        return _changes_logits(plan.loss, case.job.model.config.get("model_type"), scaled)
    if plan.loss == "liger" and find_spec("liger_kernel") is None:
        return Refusal(
            technique="loss=liger",
            reason="the package liger-kernel is not installed",
            instead="pip install liger-kernel, or choose loss fused",
        )
    return None


def _changes_logits(loss: str, kind: object, names: list[str]) -> Refusal:
    return Refusal(
        technique=f"loss={loss}",
        reason=f"{kind} changes its logits ({', '.join(names)})",
        instead="choose loss fused or chunked",
    )


def apply(step: Step) -> Step:
    """Replace the network's forward by one that returns the loss alone.

    Raises UsageError where the loss needs a plain head and the network, by a field that its configuration file does
    not state, changes its logits.
    """
    loss = {"fused": _loss_by_slices, "torch": _loss_by_torch, "liger": _loss_by_liger}[step.plan.loss]
    return replace(step, changes=(*step.changes, partial(_replace_forward, loss=loss, name=step.plan.loss)))


def _replace_forward(module: nn.Module, loss: Callable[..., Tensor], name: str) -> nn.Module:
    network = chunked_loss.writing_network(module)
    if loss is not _loss_by_slices:
        config = network.config.get_text_config()
        scaled = [field for field in (*SCALINGS, *CAPS) if getattr(config, field, None) not in (None, 1)]
        if scaled:
            raise UsageError(str(_changes_logits(name, config.model_type, scaled)))
    network.forward = MethodType(partial(_forward, own=network.forward, loss=loss), network)
    return module


def _forward(
    network: Any,
    *args: Any,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: float | None = None,
    own: Callable[..., Any],
    loss: Callable[..., Tensor],
    **inputs: Any,
) -> Any:
    """Return the mean cross-entropy of predicting each token from those before it; without labels what the network's
    `own` forward returns, as generation needs it.

    `shift_labels` and `num_items_in_batch` are as in transformers' own losses; see `chunked_loss`.
    """
    if labels is None:
        return own(*args, **inputs)
    hidden = network.base_model(*args, **inputs)[0]
    targets = chunked_loss.following(labels) if shift_labels is None else shift_labels
    return (loss(network, hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1), num_items_in_batch),)


def _loss_by_slices(network: Any, hidden: Tensor, labels: Tensor, divisor: float | None) -> Tensor:
    weights = [weight for weight in network.get_output_embeddings().parameters() if weight.requires_grad]
    return fused_cross_entropy(hidden, labels, weights, lambda part: chunked_loss.logits(network, part), divisor)


def fused_cross_entropy(
    hidden: Tensor,
    labels: Tensor,
    weights: Sequence[Tensor],
    logits_of: Callable[[Tensor], Tensor],
    divisor: float | None = None,
) -> Tensor:
    """Return the mean cross-entropy over labels that are not ignored; hidden is (tokens, width), labels (tokens).

    With a `divisor` the sum is divided by that.  `logits_of` turns (tokens, width) into logits and has the gradients
    of `weights`, each accumulated in its own dtype.  Backward can run once: it scales the gradients in place.
    """
    loss: Tensor = _autograd_function().apply(labels, logits_of, divisor, hidden, *weights)
    return loss


@cache
def _autograd_function() -> Any:
    """Return the autograd function, whose class needs torch."""
    import torch

    class Fused(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(
            ctx: Any, labels: Tensor, logits_of: Any, divisor: float | None, hidden: Tensor, *weights: Tensor
        ) -> Tensor:
            total, *ctx.gradients = _loss_and_gradients(hidden, labels, weights, logits_of, divisor)
            return total

        @staticmethod
        def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
            gradients, ctx.gradients = (
                ctx.gradients,
                None,
            )  # nothing else refers to them, so they become .grad without a copy
            return (None, None, None, *(gradient.mul_(outer) for gradient in gradients))

    return Fused


def _loss_and_gradients(
    hidden: Tensor,
    labels: Tensor,
    weights: Sequence[Tensor],
    logits_of: Callable[[Tensor], Tensor],
    divisor: float | None,
) -> list[Tensor]:
    import torch
    from torch.nn.functional import cross_entropy

    count = chunked_loss.count_labels(labels, divisor)
    total = torch.zeros((), device=hidden.device)
    hidden_gradient = torch.empty_like(hidden)
    weight_gradients = [torch.zeros_like(weight) for weight in weights]
    slices = (tensor.split(CHUNK_TOKENS) for tensor in (hidden, labels, hidden_gradient))
    for part, targets, part_gradient in zip(*slices, strict=True):
        with torch.enable_grad():
            leaf = part.detach().requires_grad_()
            scores = logits_of(leaf).float()
            loss = cross_entropy(scores, targets, reduction="sum", ignore_index=IGNORED_LABEL) / count
        del scores
        leaf_gradient, *additions = torch.autograd.grad(loss, [leaf, *weights])
        part_gradient.copy_(leaf_gradient)
        for gradient, addition in zip(weight_gradients, additions, strict=True):
            gradient.add_(addition)
        total += loss.detach()
    return [total, hidden_gradient, *weight_gradients]


def _loss_by_torch(network: Any, hidden: Tensor, labels: Tensor, divisor: float | None) -> Tensor:
    import torch
    from torch.nn import functional

    from tonnage.errors import CannotEstimate

    if not hasattr(functional, "linear_cross_entropy"):
        raise CannotEstimate(
            f"torch {torch.__version__} has no linear_cross_entropy (2.13 and newer have); choose loss fused."
        )
    hidden, weight, bias = _cast_to_one_dtype(network, hidden)
    options = torch.nn.LinearCrossEntropyOptions()
    loss: Tensor = functional.linear_cross_entropy(
        hidden, weight, labels, linear_bias=bias, options=options, reduction="mean" if divisor is None else "sum"
    )
    return loss if divisor is None else loss / divisor


def _loss_by_liger(network: Any, hidden: Tensor, labels: Tensor, divisor: float | None) -> Tensor:
    liger = importlib.import_module("liger_kernel.transformers.fused_linear_cross_entropy")
    hidden, weight, bias = _cast_to_one_dtype(network, hidden)
    function = liger.LigerFusedLinearCrossEntropyLoss(reduction="mean" if divisor is None else "sum")
    loss: Tensor = function(weight, hidden, labels, bias)
    return loss if divisor is None else loss / divisor


def _cast_to_one_dtype(network: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return hidden states, and weight and bias of the head, in the dtype in which autocast would multiply them."""
    import torch

    head = network.get_output_embeddings()
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    bias = getattr(head, "bias", None)
    return hidden.to(dtype), head.weight.to(dtype), bias if bias is None else bias.to(dtype)


FUSED_LOSS: Final = Technique(option="loss", values=("fused", "torch"), accepts=accepts, apply=apply)
LIGER: Final = Technique(
    option="loss", values=("liger",), accepts=accepts, apply=apply, libraries=("liger_kernel", "triton")
)
