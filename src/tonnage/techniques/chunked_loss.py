"""Chunked loss: the head and the cross-entropy run on slices of tokens, so that all logits never exist at once.

Each slice's logits are freed after its loss and computed again in backward (activation checkpointing of the slice).
Under autocast autograd would add up the slices' gradients of the head in the dtype of autocast, where each addition
rounds: with 64 slices in bf16 to 1 % of the gradient.  There one function computes all slices and adds them in fp32.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from types import MethodType
from typing import TYPE_CHECKING, Any, Final

from tonnage.catalog.families import types_with
from tonnage.job import IGNORED_LABEL
from tonnage.plans import CHUNK_TOKENS
from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from tonnage.case import Case
    from tonnage.step.step import Step

CAUSAL: Final = ("ForCausalLM", "LMHeadModel")
"""Endings of transformers' class names of causal language models."""

_TASKS: Final = ("causal-lm", "image-text-to-text")
"""Tasks whose networks write words from hidden states of what they read."""

SCALINGS: Final = ("logits_scaling", "logit_scale", "lm_head_multiplier", "output_multiplier")
"""Configuration fields that scale logits: divided by the first (except in HyperCLOVA X), multiplied by the others."""

CAPS: Final = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Configuration fields with the value at which logits are capped."""

ADDITIONS: Final = ("output_router_logits", "z_loss_coefficient")
"""Configuration fields by which a network adds something to its cross-entropy: the balance of experts, z-loss."""


def accepts(case: Case) -> Refusal | None:
    """Refuse networks whose loss is not the cross-entropy of one linear layer on the decoder's last hidden states."""
    config, text = case.job.model.config, case.job.model.text
    if case.job.model.kind == "factory":
        reason = "the head of a factory's network is not known"
    elif config.get("is_encoder_decoder"):
        reason = f"{config.get('model_type')} is an encoder-decoder"
    elif (classes := config.get("architectures")) and not classes[0].endswith(CAUSAL) and not sees_too(config):
        reason = f"{classes[0]} is not a causal language model"
    elif (own := types_with("other_heads").get(str(config.get("model_type")))) is not None:
        reason = f"the loss of {config['model_type']} is not that of a head on the hidden states of its body: {own}"
    elif added := [name for name in ADDITIONS if text.get(name) or config.get(name)]:
        reason = f"{config.get('model_type')} adds to its loss ({', '.join(added)})"
    else:
        return None
    return Refusal(technique=f"loss={case.plan.loss}", reason=reason, instead="choose loss plain")


def sees_too(config: Mapping[str, Any]) -> bool:
    """Return True for the configuration of a network that reads images beside text, and writes text."""
    classes = config.get("architectures") or ("",)
    return "vision_config" in config and classes[0].endswith("ForConditionalGeneration")


def apply(step: Step) -> Step:
    """Replace the network's forward by one that returns the loss alone."""
    ranks = step.world.along("tp") if step.plan.tp > 1 else None
    change = partial(_replace_forward, slice_tokens=CHUNK_TOKENS * step.plan.tp, ranks=ranks)
    return replace(step, changes=(*step.changes, change))


def _replace_forward(module: nn.Module, slice_tokens: int, ranks: DeviceMesh | None) -> nn.Module:
    network = writing_network(module)
    forward = partial(_forward, own=network.forward, slice_tokens=slice_tokens, ranks=ranks)
    network.forward = MethodType(forward, network)
    return module


def writing_network(module: nn.Module) -> Any:
    """Return transformers' network inside the module whose words are its head applied to its body's last hidden
    states.

    Its `base_model` is the body, with all inputs but the labels.  Raises CannotEstimate if there is none.
    """
    from tonnage.errors import CannotEstimate
    from tonnage.step.model import network_and_task

    network, kind = network_and_task(module)
    if kind not in _TASKS:
        raise CannotEstimate(f"A loss in slices needs a language model, not {kind}; choose loss plain.")
    has_no_head = network.base_model is network or network.get_output_embeddings() is None
    if has_no_head or network.config.is_encoder_decoder or network.config.model_type in types_with("other_heads"):
        name = type(network).__name__
        raise CannotEstimate(f"{name} has no head that works on slices of tokens; choose loss plain.")
    return network


def _forward(
    network: Any,
    *args: Any,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: float | None = None,
    own: Callable[..., Any],
    slice_tokens: int,
    ranks: DeviceMesh | None,
    **inputs: Any,
) -> Any:
    """Return the mean cross-entropy of predicting each token from those before it; without labels what the network's
    `own` forward returns, as generation needs it.

    `shift_labels` and `num_items_in_batch` are as in transformers' own losses: labels that were shifted before a
    sequence was cut, and the divisor of the sum.  The `ranks` divide the vocabulary's logits; None: this rank has
    them all.
    """
    if labels is None:
        return own(*args, **inputs)
    hidden, sum_loss = network.base_model(*args, **inputs)[0], _sum_cross_entropy
    if ranks is not None:
        from tonnage.techniques import vocabulary

        hidden = vocabulary.gathered(hidden, ranks)
        words = network.get_output_embeddings().out_features
        sum_loss = partial(vocabulary.cross_entropy, words=words, mesh=ranks)
    targets = following(labels) if shift_labels is None else shift_labels
    head = network.get_output_embeddings()
    cast = _weights_cast_by_autocast(head, hidden) if ranks is None else {}
    if cast:
        total = _sum_in_fp32(
            hidden, targets, lambda part, scores: logits(network, part, scores), head, cast, slice_tokens
        )
        return (total / count_labels(targets, num_items_in_batch),)
    mean = chunked_cross_entropy(
        hidden,
        targets,
        lambda part: logits(network, part),
        num_items_in_batch,
        slice_tokens=slice_tokens,
        sum_loss=sum_loss,
    )
    return (mean,)


def count_labels(labels: Tensor, num_items_in_batch: float | None) -> Any:
    """Return the divisor of a summed loss: the number that is given, else that of labels that are not ignored."""
    return (labels != IGNORED_LABEL).sum() if num_items_in_batch is None else num_items_in_batch


def following(labels: Tensor) -> Tensor:
    """Return the label that each token must predict; shifting labels copies less than shifting hidden states."""
    from torch.nn.functional import pad

    return pad(labels, (0, 1), value=IGNORED_LABEL)[:, 1:]


def _sum_cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    from torch.nn.functional import cross_entropy

    return cross_entropy(scores.float(), targets, reduction="sum", ignore_index=IGNORED_LABEL)


def chunked_cross_entropy(
    hidden: Tensor,
    labels: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    count: float | None = None,
    *,
    slice_tokens: int = CHUNK_TOKENS,
    sum_loss: Callable[[Tensor, Tensor], Tensor] = _sum_cross_entropy,
) -> Tensor:
    """Return the mean cross-entropy over labels that are not ignored; `logits_of` turns (tokens, width) into logits.

    It equals the plain loss up to the order of summation.  With `count` the sum is divided by that.  `sum_loss`
    returns the sum over a slice's logits and labels.
    """
    from torch.utils.checkpoint import checkpoint

    def slice_loss(part: Tensor, targets: Tensor) -> Tensor:
        return sum_loss(logits_of(part), targets)

    labels = labels.reshape(-1)
    parts = hidden.reshape(-1, hidden.shape[-1]).split(slice_tokens)
    losses = [
        checkpoint(slice_loss, part, targets, use_reentrant=False)
        for part, targets in zip(parts, labels.split(slice_tokens), strict=True)
    ]
    return sum(losses[1:], losses[0]) / count_labels(labels, count)


def _weights_cast_by_autocast(head: nn.Module, hidden: Tensor) -> dict[str, Tensor]:
    """Return the trained fp32 weights of a linear head that autocast casts, by name; none without autocast.

    Heads that hold other modules, such as adapters with dropout, are left to autograd.
    """
    import torch

    if not torch.is_autocast_enabled(hidden.device.type) or any(head.children()):
        return {}
    trained = {name: weight for name, weight in head.named_parameters() if weight.requires_grad}
    return trained if all(weight.dtype == torch.float32 for weight in trained.values()) else {}


def _sum_in_fp32(
    hidden: Tensor,
    labels: Tensor,
    logits_of: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor],
    head: nn.Module,
    weights: dict[str, Tensor],
    slice_tokens: int,
) -> Tensor:
    """Return the sum of the cross-entropy, whose gradients of the head's `weights` are added up in fp32.

    `logits_of` turns (tokens, width) into logits by a function that replaces the head.
    """
    import torch

    dtype = torch.get_autocast_dtype(hidden.device.type)

    def slice_loss(part: Tensor, targets: Tensor, copies: Sequence[Tensor]) -> Tensor:
        named = dict(zip(weights, copies, strict=True))
        scores = logits_of(part, lambda given: torch.func.functional_call(head, named, (given,)))
        return _sum_cross_entropy(scores, targets)

    flat = hidden.reshape(-1, hidden.shape[-1])
    total: Tensor = _summing_function().apply(
        labels.reshape(-1), slice_loss, dtype, slice_tokens, flat, *weights.values()
    )
    return total


@cache
def _summing_function() -> Any:
    """Return the autograd function, whose class needs torch."""
    import torch

    class Chunked(torch.autograd.Function):  # type: ignore[misc]
        """The sum over all slices; backward computes each slice again and adds its gradients to those of the others.

        The weights are cast once for all slices.  A slice's gradient has the dtype of autocast, the sums have fp32.
        """

        @staticmethod
        def forward(
            ctx: Any, labels: Tensor, slice_loss: Any, dtype: Any, slice_tokens: int, hidden: Tensor, *weights: Tensor
        ) -> Tensor:
            ctx.save_for_backward(labels, hidden, *weights)
            ctx.slice_loss, ctx.dtype, ctx.slice_tokens = slice_loss, dtype, slice_tokens
            copies = [weight.to(dtype) for weight in weights]
            total = torch.zeros((), device=hidden.device)
            for part, targets in zip(hidden.split(slice_tokens), labels.split(slice_tokens), strict=True):
                total += slice_loss(part, targets, copies)
            return total

        @staticmethod
        def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
            labels, hidden, *weights = ctx.saved_tensors
            copies = [weight.to(ctx.dtype).requires_grad_() for weight in weights]
            hidden_gradient = torch.empty_like(hidden)
            gradients: list[Tensor] = []
            slices = (tensor.split(ctx.slice_tokens) for tensor in (hidden, labels, hidden_gradient))
            for part, targets, part_gradient in zip(*slices, strict=True):
                with torch.enable_grad(), torch.autocast(hidden.device.type, ctx.dtype):
                    leaf = part.detach().requires_grad_()
                    loss = ctx.slice_loss(leaf, targets, copies)
                leaf_gradient, *additions = torch.autograd.grad(loss, [leaf, *copies], outer)
                part_gradient.copy_(leaf_gradient)
                del loss, leaf, leaf_gradient  # and with them the logits, before there are sums
                gradients = gradients or [torch.zeros_like(weight) for weight in weights]
                for gradient, addition in zip(gradients, additions, strict=True):
                    gradient.add_(addition)
                del additions
            return (None, None, None, None, hidden_gradient, *gradients)

    return Chunked


def logits(network: Any, hidden: Tensor, head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return the head's logits with the scalings that some families apply: Granite, Cohere, Falcon H1, Gemma.

    `head` replaces the network's own.
    """
    import torch

    config = network.config.get_text_config()
    scores: Tensor = (head or network.get_output_embeddings())(hidden)
    multiplies = config.model_type.startswith(tuple(types_with("multiplied_logits")))
    for name in SCALINGS:
        if (scale := getattr(config, name, None)) is not None:
            divides = name == "logits_scaling" and not multiplies
            scores = scores / scale if divides else scores * scale
    for name in CAPS:
        if (cap := getattr(config, name, None)) is not None:
            scores = torch.tanh(scores / cap) * cap
    return scores


CHUNKED_LOSS: Final = Technique(option="loss", values=("chunked",), accepts=accepts, apply=apply)
