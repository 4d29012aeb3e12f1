"""torchtune's recipes for one card with the techniques of its README's table: Llama 3.2 3B in bf16, three steps.

What full_finetune_single_device.py and lora_finetune_single_device.py of 1814feb1 do with the configurations
llama3_2/3B_*_single_device.yaml, in their order and by torchtune's own modules. Neither weights nor rows are read: a
network as it is initialised has the same tensors, and the packed rows are documents of one length.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec
from typing import Any, Final
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn

UNREAD: Final = (
    "datasets",
    "omegaconf",
    "regex",
    "sentencepiece",
    "tiktoken",
    "tiktoken.load",
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.v2",
)
"""What torchtune imports to read configurations, text and pictures, of which there are none here."""

DOCUMENT_TOKENS: Final = 128
IGNORED: Final = -100
STEPS: Final = 3

ADAPTERS: Final = {
    "lora_attn_modules": ["q_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 64,
    "lora_alpha": 128,
    "lora_dropout": 0.0,
}
"""Of 3B_lora_single_device.yaml and 3B_qlora_single_device.yaml."""


Scale = Callable[[Tensor], None]
"""Ends a step: divides the gradients by the labelled tokens and updates the weights, if that is still to be done."""


def measure(
    method: str,
    micro_batch: int,
    seq_len: int,
    packed: bool = True,
    compiled: bool = False,
    norm_compiled: bool = False,
    chunked: bool = False,
    checkpointing: bool = False,
    in_backward: bool = False,
    offload: bool = False,
    optimizer: str = "torch.optim.AdamW",
) -> dict[str, int]:
    """Bytes at the highest of the steps' peaks; blocks that wait for a stream are active, not allocated.

    `norm_compiled`: the norm behind the layers too, which torchtune leaves as it is.
    """
    for name in UNREAD:
        sys.modules.setdefault(name, MagicMock(__spec__=ModuleSpec(name, None)))
    from torchtune import modules, training

    model = _network(method)
    if compiled:
        training.compile_model(model, verbose=False)
    if norm_compiled:
        model.norm.compile()
    if checkpointing:
        training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
    around = training.get_act_offloading_ctx_manager(model, offload)
    end_step = _updated_in_backward(model, optimizer) if in_backward else _updated_after(model, optimizer)
    loss = _loss(model, compiled, chunked)
    last = torch.full((micro_batch, 1), IGNORED, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        batch = _batch(micro_batch, seq_len, packed)
        tokens = (batch["labels"] != IGNORED).sum()
        with_tokens = _loss_of(model, loss, batch, last, around) * tokens
        with_tokens.backward()
        end_step(1 / tokens)
        with_tokens.item()
    return {
        "active_bytes": torch.cuda.memory_stats()["active_bytes.all.peak"],
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def _network(method: str) -> nn.Module:
    """`method` is full, lora or qlora."""
    from torchtune import training
    from torchtune.models import llama3_2
    from torchtune.modules import peft

    with training.set_default_dtype(torch.bfloat16), torch.device("cuda"):
        if method == "full":
            return llama3_2.llama3_2_3b()
        model = {"lora": llama3_2.lora_llama3_2_3b, "qlora": llama3_2.qlora_llama3_2_3b}[method](**ADAPTERS)
    peft.set_trainable_params(model, peft.get_adapter_params(model))
    return model


def _loss(model: nn.Module, compiled: bool, chunked: bool) -> nn.Module:
    """Of the two only the one in chunks is compiled in place; what compiling the other gives the recipe drops."""
    from torchtune import training
    from torchtune.modules.loss import CEWithChunkedOutputLoss

    loss = CEWithChunkedOutputLoss() if chunked else nn.CrossEntropyLoss(ignore_index=IGNORED)
    if compiled:
        training.compile_loss(loss, verbose=False)
    if chunked:
        model.set_num_output_chunks(loss.num_output_chunks)
    return loss


def _loss_of(
    model: nn.Module, loss: nn.Module, batch: dict[str, Any], last: Tensor, around: AbstractContextManager[Any]
) -> Tensor:
    labels = batch.pop("labels")
    with around:
        logits = model(**batch)
    labels = torch.hstack((labels[..., 1:], last))
    if not isinstance(logits, list):
        labels = labels.reshape(-1)
        logits = logits.reshape(-1, logits.size(-1))
    return loss(logits, labels)


def _updated_after(model: nn.Module, name: str) -> Scale:
    """One optimizer for all weights, once their gradients are divided."""
    from torchtune import training

    optimizer = _optimizer(name, list(model.parameters()))

    def end_step(per_token: Tensor) -> None:
        training.scale_grads(model, per_token)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return end_step


def _updated_in_backward(model: nn.Module, name: str) -> Scale:
    """An optimizer for each weight, which steps as soon as its gradient is whole."""
    from torchtune import training

    each = {parameter: _optimizer(name, [parameter]) for parameter in model.parameters()}
    training.register_optim_in_bwd_hooks(model=model, optim_dict=each)
    return lambda per_token: None


def _optimizer(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """`name` as a configuration has it; torch's own is fused, as in the configurations that have it."""
    module, kind = name.rsplit(".", 1)
    options = {"fused": True} if module == "torch.optim" else {}
    return getattr(importlib.import_module(module), kind)(parameters, lr=2e-5, **options)


def _batch(micro_batch: int, seq_len: int, packed: bool) -> dict[str, Any]:
    """On the card; packed rows bring the places of their tokens and a mask."""
    from torchtune import data, utils

    row = {"tokens": torch.zeros(seq_len, dtype=torch.int64), "labels": torch.zeros(seq_len, dtype=torch.int64)}
    if packed:
        places = torch.arange(seq_len) % DOCUMENT_TOKENS
        row |= {"input_pos": places, "seq_lens": torch.full((seq_len // DOCUMENT_TOKENS,), DOCUMENT_TOKENS)}
        batch = data.padded_collate_packed([row] * micro_batch)
    else:
        batch = data.padded_collate_sft([{name: part.tolist() for name, part in row.items()}] * micro_batch)
    utils.batch_to_device(batch, torch.device("cuda"))
    return batch
