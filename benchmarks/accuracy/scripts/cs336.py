"""A step of the network that Stanford's CS336 hands out, by its own AdamW, forward alone, or with states divided.

What cs336_systems/benchmark.py and optimizer_state_sharding_benchmark.py of ShibukiZero/assignment2-systems measure.
The network and the optimizer are those of the folder that the environment variable CS336 names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

IMPORTS = ("cs336_basics.model", "cs336_basics.optimizer")
ROWS, WORDS = 4, 10_000
SIZES: Final = {"xl": (48, 1600, 25), "2.7b": (32, 2560, 32)}
"""Layers, width and heads."""
STEPS: Final = 3
"""The last is measured; the source makes five before it."""


def prepare() -> None:
    """Make the network importable, once for all jobs."""
    if "CS336" in os.environ:
        sys.path.insert(0, os.path.join(os.environ["CS336"], "cs336-basics"))


def measure(size: str, tokens: int, trains: bool, precision: str, optimizer: str = "whole") -> dict[str, int]:
    """Bytes at the peak of a step; `optimizer`: whole, or on two ranks replicated or divided, in their first step."""
    if optimizer != "whole":
        return _on_two_ranks(size, tokens, divided=optimizer == "divided")
    network, ids, labels = _network(size, tokens), *_batch(tokens, "cuda")
    update = _adamw()(network.parameters(), lr=1e-3, weight_decay=0.01) if trains else None
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        if update is None:
            with torch.no_grad(), _autocast(precision):
                network(ids)
        else:
            network.zero_grad(set_to_none=True)
            with _autocast(precision):
                loss = _loss(network, ids, labels)
            loss.backward()
            update.step()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def _on_two_ranks(size: str, tokens: int, *, divided: bool) -> dict[str, int]:
    """One step from nothing: gradients averaged tensor by tensor, states whole on each rank, or each on one."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    network = _network(size, tokens)
    for parameter in network.parameters():
        dist.broadcast(parameter.data, src=0)
    ids, labels = (one.to("cuda") for one in _batch(tokens, "cpu"))
    kind = Divided if divided else _adamw()
    update = kind(network.parameters(), lr=1e-3, weight_decay=0.01)
    update.zero_grad(set_to_none=True)
    loss = _loss(network, ids, labels)
    loss.backward()
    for parameter in network.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    update.step()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "after_bytes": torch.cuda.memory_allocated(),
    }


class Divided(torch.optim.Optimizer):
    """Each tensor's states are on one rank, by turns, which updates it and tells the others."""

    def __init__(self, parameters: Iterable[nn.Parameter], **options: Any) -> None:
        super().__init__(parameters, {})
        ranks, rank = dist.get_world_size(), dist.get_rank()
        self.owned = _adamw()(self.param_groups[0]["params"][rank::ranks], **options)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update what this rank owns, and take the rest from its owners."""
        self.owned.step()
        for place, parameter in enumerate(self.param_groups[0]["params"]):
            dist.broadcast(parameter.data, src=place % dist.get_world_size())


def _network(size: str, tokens: int) -> nn.Module:
    from cs336_basics.model import BasicsTransformerLM

    layers, width, heads = SIZES[size]
    with torch.device("meta"):  # on the host, in the source
        network: nn.Module = BasicsTransformerLM(
            vocab_size=WORDS,
            context_length=tokens,
            d_model=width,
            num_layers=layers,
            num_heads=heads,
            d_ff=4 * width,
            rope_theta=10_000.0,
        )
    return network.to_empty(device="cuda")


def _adamw() -> Any:
    from cs336_basics.optimizer import AdamW

    return AdamW


def _batch(tokens: int, device: str) -> tuple[Tensor, Tensor]:
    ids, labels = (torch.randint(WORDS, (ROWS, tokens), device=device) for _ in range(2))
    return ids, labels


def _autocast(precision: str) -> AbstractContextManager[Any]:
    return torch.autocast("cuda", dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


def _loss(network: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    logits = network(ids)
    return functional.cross_entropy(logits.reshape(-1, WORDS), labels.reshape(-1))
