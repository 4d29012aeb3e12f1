"""Chunked loss: the head and the cross-entropy run on slices of tokens, so all logits never exist at once.

Each slice's logits are dropped after its loss and made again in backward (activation checkpointing of the slice).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, Final

from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tonnage.device import Cluster
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.step.step import Step

CHUNK_TOKENS: Final = 1024
"""Tokens of one slice; its logits in fp32 are 0.5 GiB for a vocabulary of 128,256.

Ranks that divide the vocabulary take as many times more, whose logits are as much on each: what a slice costs besides
its products, the host's work on divided tensors and three all-reduces, does not get less with its length."""

CAUSAL: Final = ("ForCausalLM", "LMHeadModel")
"""How transformers' class names of causal language models end."""

IGNORED_LABEL: Final = -100


def accepts(job: Job, plan: Plan, cluster: Cluster) -> Refusal | None:
    """Only networks whose head is one linear layer over the decoder's last hidden states."""
    if job.model.kind == "factory":
        reason = "the head of a factory's network is not known"
    elif job.model.config.get("is_encoder_decoder"):
        reason = f"{job.model.config.get('model_type')} is an encoder-decoder"
    elif (classes := job.model.config.get("architectures")) and not classes[0].endswith(CAUSAL):
        reason = f"{classes[0]} is not a causal language model"
    else:
        return None
    return Refusal(technique=f"loss={plan.loss}", reason=reason, instead="choose loss plain")


def apply(step: Step) -> Step:
    """Replace the network's forward by one that returns the loss alone."""
    slice_tokens = CHUNK_TOKENS * step.plan.tp
    return replace(step, changes=(*step.changes, partial(_with_chunked_loss, slice_tokens=slice_tokens)))


def _with_chunked_loss(module: nn.Module, slice_tokens: int) -> nn.Module:
    network = causal_network(module)
    network.forward = MethodType(partial(_forward, slice_tokens=slice_tokens), network)
    return module


def causal_network(module: nn.Module, wanted: str = "A loss in slices", instead: str = "loss plain") -> Any:
    """transformers' causal language model inside the module.

    Raises CannotEstimate when it is something else; `wanted` is what needs one, `instead` what can be chosen.
    """
    from tonnage.errors import CannotEstimate
    from tonnage.step.model import hugging_face, task

    network = hugging_face(module)
    kind = task(network.config.to_dict()) if network is not None else "unknown"
    if network is None or kind != "causal-lm":
        raise CannotEstimate(f"{wanted} needs a causal language model, not {kind}; choose {instead}.")
    return network


def _forward(
    network: Any,
    labels: Tensor,
    shift_labels: Tensor | None = None,
    num_items_in_batch: float | None = None,
    *,
    slice_tokens: int,
    **inputs: Any,
) -> tuple[Tensor]:
    """The mean cross-entropy of predicting each token from those before it.

    `shift_labels` and `num_items_in_batch` as transformers' own losses take them: labels that were shifted before a
    sequence was cut, and what to divide the sum by.
    """
    hidden = network.base_model(**inputs)[0]
    targets = following(labels) if shift_labels is None else shift_labels
    mean = chunked_cross_entropy(
        hidden, targets, lambda part: logits(network, part), num_items_in_batch, slice_tokens=slice_tokens
    )
    return (mean,)


def following(labels: Tensor) -> Tensor:
    """The label that each token is to predict; shifting labels copies less than shifting hidden states."""
    from torch.nn.functional import pad

    return pad(labels, (0, 1), value=IGNORED_LABEL)[:, 1:]


def chunked_cross_entropy(
    hidden: Tensor, labels: Tensor, logits_of: Any, count: float | None = None, *, slice_tokens: int = CHUNK_TOKENS
) -> Tensor:
    """Mean cross-entropy over labels that are not ignored; `logits_of` turns (tokens, width) into logits.

    Equal to the plain loss up to the order of summation.  With `count` the sum is divided by that.
    """
    from torch.utils.checkpoint import checkpoint

    def summed(part: Tensor, targets: Tensor) -> Tensor:
        from torch.nn.functional import cross_entropy

        scores = logits_of(part).float()
        return cross_entropy(scores, targets, reduction="sum", ignore_index=IGNORED_LABEL)

    labels = labels.reshape(-1)
    parts = hidden.reshape(-1, hidden.shape[-1]).split(slice_tokens)
    losses = [
        checkpoint(summed, part, targets, use_reentrant=False)
        for part, targets in zip(parts, labels.split(slice_tokens), strict=True)
    ]
    return sum(losses[1:], losses[0]) / ((labels != IGNORED_LABEL).sum() if count is None else count)


def logits(network: Any, hidden: Tensor) -> Tensor:
    """The head with the scalings that some families apply: Granite, Cohere, Gemma."""
    import torch

    config = network.config.get_text_config()
    scores: Tensor = network.get_output_embeddings()(hidden)
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        scores = scores / divisor
    if (factor := getattr(config, "logit_scale", None)) is not None:
        scores = scores * factor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        scores = torch.tanh(scores / cap) * cap
    return scores


CHUNKED_LOSS: Final = Technique(option="loss", values=("chunked",), accepts=accepts, apply=apply)
