"""minGPT's networks learning to sort three digits, three steps of 64 rows of 11 tokens.

What demo.ipynb of karpathy/minGPT (37baab7) runs, with gradients cleared where mingpt/trainer.py has it, before
backward, or after each step, as its pull request 106 would have it.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

DIGITS, TOKENS, ROWS, DROPPED = 3, 11, 64, 0.1
SHAPES: Final = {"gpt-nano": (3, 3, 48), "gpt2-xl": (48, 25, 1600)}
"""Layers, heads and width."""


class Gelu(nn.Module):
    """GELU's approximation by tanh in single operations."""

    def forward(self, x: Tensor) -> Tensor:
        """Elementwise."""
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class Layer(nn.Module):
    """Attention with all scores and a feed-forward network, each behind a norm and before dropout."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), Gelu(), nn.Linear(4 * width, width), nn.Dropout(DROPPED)
        )
        self.drop_scores, self.drop = nn.Dropout(DROPPED), nn.Dropout(DROPPED)
        self.register_buffer("mask", torch.tril(torch.ones(TOKENS, TOKENS)).view(1, 1, TOKENS, TOKENS))

    def forward(self, x: Tensor) -> Tensor:
        """`x` (rows, tokens, width)."""
        x = x + self._attend(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))

    def _attend(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        query, key, value = (
            one.view(rows, tokens, self.heads, -1).transpose(1, 2) for one in self.qkv(x).split(width, dim=2)
        )
        scores = (query @ key.transpose(-2, -1)) * (1.0 / math.sqrt(key.shape[-1]))
        scores = scores.masked_fill(self.mask == 0, float("-inf"))
        scores = functional.softmax(scores, dim=-1)
        scores = self.drop_scores(scores)
        mixed = (scores @ value).transpose(1, 2).contiguous().view(rows, tokens, width)
        return self.drop(self.out(mixed))


class Gpt(nn.Module):
    """Embeddings, layers, a last norm and a head of its own."""

    def __init__(self, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.digits, self.places = nn.Embedding(DIGITS, width), nn.Embedding(TOKENS, width)
        self.drop = nn.Dropout(DROPPED)
        self.layers = nn.Sequential(*(Layer(heads, width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, DIGITS, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """`ids`, `targets` (rows, tokens); the loss."""
        places = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        x = self.drop(self.digits(ids) + self.places(places))
        logits = self.head(self.norm(self.layers(x)))
        return functional.cross_entropy(logits.view(-1, DIGITS), targets.view(-1), ignore_index=-1)


def measure(shape: str, cleared: str, foreach: bool) -> dict[str, int]:
    """Bytes at the peak; gradients are `cleared` before "backward" or behind the "step"."""
    with torch.device("cuda"):
        model = Gpt(*SHAPES[shape])
    matrices = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    rest = [parameter for parameter in model.parameters() if not any(parameter is one for one in matrices)]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=5e-4, betas=(0.9, 0.95), foreach=foreach)
    for _ in range(3):
        ids, targets = (torch.zeros(ROWS, TOKENS, dtype=torch.int64).pin_memory().to("cuda") for _ in range(2))
        loss = model(ids, targets)
        if cleared == "backward":
            model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if cleared == "step":
            model.zero_grad(set_to_none=True)
    return {"allocated_bytes": torch.cuda.max_memory_allocated()}
