"""Fused linear cross-entropy: head and loss on slices of tokens, whose gradients are computed at once in forward.

All logits never exist, and nothing runs twice.  `fused`: plain torch operations, for any head; `torch`: torch's own
`linear_cross_entropy` (2.13 and newer), which chooses the slices; `liger`: Liger's Triton kernels.  What is kept for
backward is the gradient of the hidden states and that of the head's weights.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from types import MethodType
from typing import TYPE_CHECKING, Any, Final

from tonnage.job import IGNORED_LABEL
from tonnage.plans import CHUNK_TOKENS
from tonnage.techniques import chunked_loss
from tonnage.techniques.chunked_loss import CAP, SCALINGS
from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tonnage.case import Case
    from tonnage.step.step import Step


def accepts(case: Case) -> Refusal | None:
    """As for the chunked loss; `torch` and `liger` know plain linear heads only."""
    plan = case.plan
    refusal = chunked_loss.accepts(case)
    if refusal is not None or plan.loss == "fused":
        return refusal
    text = case.job.model.text
    scaled = [name for name in (*SCALINGS, CAP) if text.get(name) not in (None, 1)]
    if scaled:
        return Refusal(
            technique=f"loss={plan.loss}",
            reason=f"{case.job.model.config.get('model_type')} changes its logits ({', '.join(scaled)})",
            instead="choose loss fused or chunked",
        )
    if plan.loss == "liger" and find_spec("liger_kernel") is None:
        return Refusal(
            technique="loss=liger",
            reason="the package liger-kernel is not installed",
            instead="pip install liger-kernel, or choose loss fused",
        )
    return None


def apply(step: Step) -> Step:
    """Replace the network's forward by one that returns the loss alone."""
    loss = {"fused": _own, "torch": _torchs, "liger": _ligers}[step.plan.loss]
    return replace(step, changes=(*step.changes, partial(_with_loss, loss=loss)))


def _with_loss(module: nn.Module, loss: Callable[..., Tensor]) -> nn.Module:
    network = chunked_loss.writing_network(module)
    network.forward = MethodType(partial(_forward, loss=loss), network)
    return module


def _forward(network: Any, labels: Tensor, *, loss: Callable[..., Tensor], **inputs: Any) -> tuple[Tensor]:
    hidden = network.base_model(**inputs)[0]
    following = chunked_loss.following(labels).reshape(-1)
    return (loss(network, hidden.reshape(-1, hidden.shape[-1]), following),)


def _own(network: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    weights = [weight for weight in network.get_output_embeddings().parameters() if weight.requires_grad]
    return fused_cross_entropy(hidden, labels, weights, lambda part: chunked_loss.logits(network, part))


def fused_cross_entropy(
    hidden: Tensor, labels: Tensor, weights: Sequence[Tensor], logits_of: Callable[[Tensor], Tensor]
) -> Tensor:
    """Mean cross-entropy over labels that are not ignored; hidden is (tokens, width), labels (tokens).

    `logits_of` turns (tokens, width) into logits and has the gradients of `weights`, each accumulated in its own
    dtype.  One backward is possible: it scales the gradients in place.
    """
    loss: Tensor = _function().apply(labels, logits_of, hidden, *weights)
    return loss


@cache
def _function() -> Any:
    """The autograd function, made when torch is there."""
    import torch

    class Fused(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, labels: Tensor, logits_of: Any, hidden: Tensor, *weights: Tensor) -> Tensor:
            total, *ctx.gradients = _loss_and_gradients(hidden, labels, weights, logits_of)
            return total

        @staticmethod
        def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
            gradients, ctx.gradients = ctx.gradients, None  # held by nobody else, they become .grad as they are
            return (None, None, *(gradient.mul_(outer) for gradient in gradients))

    return Fused


def _loss_and_gradients(
    hidden: Tensor, labels: Tensor, weights: Sequence[Tensor], logits_of: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    import torch
    from torch.nn.functional import cross_entropy

    count = (labels != IGNORED_LABEL).sum()
    total = torch.zeros((), device=hidden.device)
    of_hidden = torch.empty_like(hidden)
    of_weights = [torch.zeros_like(weight) for weight in weights]
    slices = (tensor.split(CHUNK_TOKENS) for tensor in (hidden, labels, of_hidden))
    for part, targets, of_part in zip(*slices, strict=True):
        with torch.enable_grad():
            leaf = part.detach().requires_grad_()
            scores = logits_of(leaf).float()
            loss = cross_entropy(scores, targets, reduction="sum", ignore_index=IGNORED_LABEL) / count
        del scores
        found, *others = torch.autograd.grad(loss, [leaf, *weights])
        of_part.copy_(found)
        for whole, piece in zip(of_weights, others, strict=True):
            whole.add_(piece)
        total += loss.detach()
    return [total, of_hidden, *of_weights]


def _torchs(network: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    import torch
    from torch.nn import functional

    from tonnage.errors import CannotEstimate

    if not hasattr(functional, "linear_cross_entropy"):
        raise CannotEstimate(
            f"torch {torch.__version__} has no linear_cross_entropy (2.13 and newer have); choose loss fused."
        )
    hidden, weight, bias = _in_one_dtype(network, hidden)
    options = torch.nn.LinearCrossEntropyOptions()
    loss: Tensor = functional.linear_cross_entropy(hidden, weight, labels, linear_bias=bias, options=options)
    return loss


def _ligers(network: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    liger = importlib.import_module("liger_kernel.transformers.fused_linear_cross_entropy")
    hidden, weight, bias = _in_one_dtype(network, hidden)
    loss: Tensor = liger.LigerFusedLinearCrossEntropyLoss()(weight, hidden, labels, bias)
    return loss


def _in_one_dtype(network: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states, weight and bias of the head in the dtype in which autocast would multiply them."""
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
