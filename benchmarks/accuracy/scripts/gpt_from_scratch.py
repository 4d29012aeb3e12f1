"""A GPT-2 written out by hand, trained for some steps.

What `ch05/10_llm-training-speed` of rasbt/LLMs-from-scratch runs; each of its tips is a switch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

LAYERS: Final = 12
WIDTH: Final = 768
PROMPT_TOKENS: Final = 4  # of "Every effort moves you"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the network and the tips that are followed."""

    vocabulary: int = 50257
    context: int = 1024
    heads: int = 12
    dropout: float = 0.1
    mask_on_the_fly: bool = False
    own_modules: bool = True
    """LayerNorm and GELU written out, not torch's."""
    flash: bool = False


class Norm(nn.Module):
    """Layer norm in seven operations, each of which makes a tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """`x` (..., width), normalised over the last axis."""
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        normal = (x - mean) / torch.sqrt(variance + 1e-5)
        return self.scale * normal + self.shift


class Gelu(nn.Module):
    """GELU's approximation by tanh in single operations."""

    def forward(self, x: Tensor) -> Tensor:
        """Elementwise; the constant under the root lies on the host."""
        root = torch.sqrt(torch.tensor(2.0 / torch.pi))
        return 0.5 * x * (1 + torch.tanh(root * (x + 0.044715 * torch.pow(x, 3))))


class Attention(nn.Module):
    """Causal attention with all scores, or by torch's fused operation."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        if shape.flash:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        else:
            self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
            if not shape.mask_on_the_fly:
                self.register_buffer("mask", torch.triu(torch.ones(shape.context, shape.context), diagonal=1))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """`x` (rows, tokens, width)."""
        mixed = self._fused(x) if self.shape.flash else self._scores(x)
        return self.out(mixed)

    def _fused(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        heads = self.qkv(x).view(rows, tokens, 3, self.shape.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        dropout = self.shape.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return mixed.transpose(1, 2).contiguous().view(rows, tokens, WIDTH)

    def _scores(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        keys = self.key(x)
        queries = self.query(x)
        values = self.value(x)
        keys = keys.view(rows, tokens, self.shape.heads, -1)
        values = values.view(rows, tokens, self.shape.heads, -1)
        queries = queries.view(rows, tokens, self.shape.heads, -1)
        keys = keys.transpose(1, 2)
        queries = queries.transpose(1, 2)
        values = values.transpose(1, 2)
        scores = queries @ keys.transpose(2, 3)
        if self.shape.mask_on_the_fly:
            hidden = torch.triu(torch.ones(tokens, tokens, dtype=torch.bool, device=x.device), diagonal=1)
        else:
            hidden = self.mask.bool()[:tokens, :tokens]
        scores.masked_fill_(hidden, -torch.inf)
        weights = torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)
        weights = functional.dropout(weights, self.shape.dropout, self.training)
        mixed = (weights @ values).transpose(1, 2)
        return mixed.reshape(rows, tokens, WIDTH)


class Layer(nn.Module):
    """Attention and a feed-forward network, each behind a norm and before dropout."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        activation = Gelu() if shape.own_modules else nn.GELU(approximate="tanh")
        self.attention = Attention(shape)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), activation, nn.Linear(4 * WIDTH, WIDTH))
        self.norm_1, self.norm_2 = (_norm(shape) for _ in range(2))
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """`x` (rows, tokens, width)."""
        shortcut = x
        x = self.norm_1(x)
        x = self.attention(x)
        x = self.drop(x)
        x = x + shortcut
        shortcut = x
        x = self.norm_2(x)
        x = self.feed_forward(x)
        x = self.drop(x)
        return x + shortcut


class Gpt(nn.Module):
    """Embeddings, layers, a last norm and a head of its own."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, WIDTH)
        self.positions = nn.Embedding(shape.context, WIDTH)
        self.drop = nn.Dropout(shape.dropout)
        self.layers = nn.Sequential(*(Layer(shape) for _ in range(LAYERS)))
        self.norm = _norm(shape)
        self.head = nn.Linear(WIDTH, shape.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """`ids` (rows, tokens); logits (rows, tokens, vocabulary)."""
        embedded = self.tokens(ids)
        positions = self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = embedded + positions
        x = self.drop(x)
        x = self.layers(x)
        x = self.norm(x)
        return self.head(x)


def _norm(shape: Shape) -> nn.Module:
    return Norm(WIDTH) if shape.own_modules else nn.LayerNorm(WIDTH)


def measure(micro_batch: int, dtype: str, fused: bool, tf32: bool, **shape: Any) -> dict[str, int]:
    """Bytes reserved after steps, an evaluation, more steps and 50 tokens of text: an epoch cut short."""
    if tf32:
        torch.set_float32_matmul_precision("high")
    sizes = Shape(**shape)
    with torch.device("cuda"):
        model = Gpt(sizes).to(getattr(torch, dtype))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, fused=fused or None)
    model.train()
    for step in range(6):
        optimizer.zero_grad()
        loss = _loss(model, sizes, micro_batch)
        loss.backward()
        optimizer.step()
        if step in {0, 3}:
            _evaluate(model, sizes, micro_batch)
    after_bytes = torch.cuda.memory_allocated()
    _write(model, sizes, 50)
    return {"after_bytes": after_bytes, "reserved_bytes": torch.cuda.memory_reserved()}


def _loss(model: nn.Module, sizes: Shape, rows: int) -> Tensor:
    inputs = torch.zeros(rows, sizes.context, dtype=torch.int64).to("cuda")
    targets = torch.zeros(rows, sizes.context, dtype=torch.int64).to("cuda")
    logits = model(inputs)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _evaluate(model: nn.Module, sizes: Shape, rows: int) -> None:
    model.eval()
    with torch.no_grad():
        for _ in range(2):  # a batch of each loader
            _loss(model, sizes, rows)
    model.train()


def _write(model: nn.Module, sizes: Shape, tokens: int) -> None:
    """Greedily, the whole text again for every token."""
    model.eval()
    ids = torch.zeros(1, PROMPT_TOKENS, dtype=torch.int64).to("cuda")
    with torch.no_grad():
        for _ in range(tokens):
            logits = model(ids[:, -sizes.context :])
            logits = logits[:, -1, :]
            ids = torch.cat((ids, torch.argmax(logits, dim=-1, keepdim=True)), dim=1)
    model.train()
