"""Checkpointing, a loss in slices and the optimizer, for a train.py with a training loop of its own."""

import importlib
from functools import partial
from types import MethodType
from typing import Any

import job
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

KEPT = ("mm", "addmm", "bmm", "baddbmm", "linear", "_grouped_mm", "_scaled_mm")
ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "fused_attention_overrideable")
SLICE_TOKENS = 1024

OPTIMIZERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "adamw": ("torch.optim", "AdamW", {}),
    "adamw-loop": ("torch.optim", "AdamW", {"foreach": False, "fused": False}),
    "adamw-foreach": ("torch.optim", "AdamW", {"foreach": True}),
    "adamw-fused": ("torch.optim", "AdamW", {"fused": True}),
    "sgd": ("torch.optim", "SGD", {"momentum": 0.9}),
    "sgd-plain": ("torch.optim", "SGD", {}),
    "adafactor": ("torch.optim", "Adafactor", {}),
    "adamw-8bit": ("bitsandbytes.optim", "AdamW8bit", {}),
    "paged-adamw": ("bitsandbytes.optim", "PagedAdamW", {}),
    "paged-adamw-8bit": ("bitsandbytes.optim", "PagedAdamW8bit", {}),
    "lion": ("bitsandbytes.optim", "Lion", {}),
    "lion-8bit": ("bitsandbytes.optim", "Lion8bit", {}),
    "adamw-8bit-ao": ("torchao.optim", "AdamW8bit", {}),
    "adamw-4bit": ("torchao.optim", "AdamW4bit", {}),
    "adamw-fp8-ao": ("torchao.optim", "AdamWFp8", {}),
}


def optimizer(settings: job.Job, parameters: Any, lr: float = 1e-4) -> Any:
    """Return the optimizer that job.json names, over these parameters."""
    module, name, others = OPTIMIZERS[settings.optimizer or "adamw"]
    return getattr(importlib.import_module(module), name)(parameters, lr=lr, **others)


def checkpointed(settings: job.Job, model: Any) -> Any:
    """Return the network with layers that run again in backward: all, or every N-th; selective keeps products."""
    if settings.checkpointing is None:
        return model
    network = model.get_base_model() if hasattr(model, "get_base_model") else model
    arguments: dict[str, Any] = {"use_reentrant": False}
    every = int(settings.checkpointing.removeprefix("every-")) if settings.checkpointing.startswith("every-") else 1
    if settings.checkpointing == "selective":
        arguments["context_fn"] = partial(create_selective_checkpoint_contexts, kept(network))
    if hasattr(network, "activation_checkpointing_enable"):  # transformers 5.23's name
        network.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments, every_n_layers=every)
    elif every == 1:
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
    else:
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments, every_n_layers=every)
    return model


def kept(model: nn.Module) -> list[Any]:
    """Return the operations whose outputs are kept: matrix products and fused attention, as this torch has them.

    Left out are those of experts with a bias, which transformers adds in place: kept tensors must not change.
    """
    in_place = any(getattr(part, "has_bias", False) is True for part in model.modules())
    products = [name for name in KEPT if name != "_grouped_mm" or not in_place]
    names = [*products, *(f"_scaled_dot_product_{name}" for name in ATTENTION)]
    packets = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    return [packet.default for packet in packets if "default" in packet.overloads()]


def in_slices(settings: job.Job, model: nn.Module) -> nn.Module:
    """Return the network with a forward that returns the loss alone and never has all logits at once."""
    if settings.loss == "chunked":
        network: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        network.forward = MethodType(_loss_in_slices, network)
    return model


def _loss_in_slices(network: Any, labels: Tensor, **inputs: Any) -> tuple[Tensor]:
    hidden = network.base_model(**inputs)[0]
    targets = pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
    parts = zip(hidden.reshape(-1, hidden.shape[-1]).split(SLICE_TOKENS), targets.split(SLICE_TOKENS), strict=True)
    losses = [checkpoint(_summed, network, part, wanted, use_reentrant=False) for part, wanted in parts]
    return (sum(losses[1:], losses[0]) / (targets != -100).sum(),)


def _summed(network: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of a slice's losses, with the scalings that some families apply (Granite, Cohere, Gemma)."""
    config = network.config.get_text_config()
    scores = network.get_output_embeddings()(hidden)
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        scores = scores * divisor if config.model_type.startswith("hyperclovax") else scores / divisor
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):
        if (factor := getattr(config, name, None)) is not None:
            scores = scores * factor
    for name in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"):
        if (cap := getattr(config, name, None)) is not None:
            scores = torch.tanh(scores / cap) * cap
    scores = scores.float()  # under the same name, so that the scores in the narrow dtype are freed
    return cross_entropy(scores, targets, reduction="sum", ignore_index=-100)
