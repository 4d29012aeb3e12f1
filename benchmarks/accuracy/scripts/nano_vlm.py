"""nanoVLM's 222 M parameters in bf16 autocast, two steps with each number of rows, as its measure_vram.py does.

Of huggingface/nanoVLM, f23454a (May 2025: 49 tokens of a picture before 79 of text) and 91a3b93 (June: 64 of a
picture's among 128).  That script calls `locals()` in a function, which holds the last logits until the next call, a
number of rows later.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

PATCH, SEEN, SEEN_LAYERS, SEEN_HEADS = 16, 768, 12, 12
WIDTH, INNER, LAYERS, HEADS, KEY_HEADS, HEAD = 576, 1536, 30, 9, 3, 64
SHUFFLE: Final = 2  # patches along each axis that make one token


class SeeingLayer(nn.Module):
    """Attention and a feed-forward network on patches, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(SEEN), nn.LayerNorm(SEEN)
        self.qkv, self.out = nn.Linear(SEEN, 3 * SEEN), nn.Linear(SEEN, SEEN)
        self.mlp = nn.Sequential(nn.Linear(SEEN, 4 * SEEN), nn.GELU(approximate="tanh"), nn.Linear(4 * SEEN, SEEN))

    def forward(self, x: Tensor) -> Tensor:
        """`x` (rows, patches, SEEN)."""
        x = x + self._attend(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))

    def _attend(self, x: Tensor) -> Tensor:
        rows, patches, _ = x.shape
        parts = (one.view(rows, patches, SEEN_HEADS, -1).transpose(1, 2) for one in self.qkv(x).split(SEEN, dim=2))
        mixed = functional.scaled_dot_product_attention(*parts)
        return self.out(mixed.transpose(1, 2).contiguous().view(rows, patches, SEEN))


class Seeing(nn.Module):
    """Pictures to tokens: patches, layers, a norm, four patches to one token, a projection."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, SEEN, kernel_size=PATCH, stride=PATCH)
        self.positions = nn.Parameter(torch.zeros(1, (side // PATCH) ** 2, SEEN))
        self.layers = nn.ModuleList(SeeingLayer() for _ in range(SEEN_LAYERS))
        self.norm = nn.LayerNorm(SEEN)
        self.project = nn.Linear(SEEN * SHUFFLE**2, WIDTH, bias=False)

    def forward(self, pictures: Tensor) -> Tensor:
        """`pictures` (rows, 3, side, side); (rows, tokens, WIDTH)."""
        x = self.patches(pictures).flatten(2).transpose(1, 2)
        x = x + self.positions
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        rows, patches, _ = x.shape
        side = int(patches**0.5) // SHUFFLE
        x = x.reshape(rows, side, SHUFFLE, side, SHUFFLE, SEEN).permute(0, 1, 3, 2, 4, 5).contiguous()
        return self.project(x.reshape(rows, side * side, -1))


class Norm(nn.Module):
    """RMS norm, in the dtype that comes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """`x` (..., WIDTH)."""
        scale = torch.rsqrt(torch.mean(x**2, dim=-1, keepdim=True) + 1e-5)
        return x * scale * self.weight


class Layer(nn.Module):
    """Grouped causal attention and a gated feed-forward network, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = Norm(), Norm()
        self.query, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """`x` (rows, tokens, WIDTH), `mask` (rows, tokens); with the keys and values."""
        mixed, cache = self._attend(self.norm_1(x), turns, mask)
        x = x + mixed
        given = self.norm_2(x)
        gate = functional.silu(self.gate(given))
        return x + self.down(gate * self.up(given)), cache

    def _attend(self, x: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        rows, tokens, _ = x.shape
        query = self.query(x).view(rows, tokens, HEADS, HEAD).transpose(1, 2)
        key = self.key(x).view(rows, tokens, KEY_HEADS, HEAD).transpose(1, 2)
        value = self.value(x).view(rows, tokens, KEY_HEADS, HEAD).transpose(1, 2)
        query, key = _turn(query, turns), _turn(key, turns)
        keys = key.repeat_interleave(HEADS // KEY_HEADS, dim=1)
        values = value.repeat_interleave(HEADS // KEY_HEADS, dim=1)
        hidden = (1.0 - mask.unsqueeze(1).unsqueeze(2).float()) * torch.finfo(query.dtype).min
        mixed = functional.scaled_dot_product_attention(query, keys, values, attn_mask=hidden, is_causal=True)
        return self.out(mixed.transpose(1, 2).contiguous().view(rows, tokens, WIDTH)), (key, value)


def _turn(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """`x` (rows, heads, tokens, HEAD), turned by its positions."""
    cosines, sines = (one.unsqueeze(1) for one in turns)
    first, second = x.chunk(2, dim=-1)
    return (x * cosines) + (torch.cat((-second, first), dim=-1) * sines)


class NanoVlm(nn.Module):
    """Pictures and words to logits and a loss."""

    def __init__(self, side: int, words: int, among: bool) -> None:
        super().__init__()
        self.among = among
        self.seeing = Seeing(side)
        self.words = nn.Embedding(words, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = Norm()
        self.head = nn.Linear(WIDTH, words, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("rates", torch.zeros(HEAD // 2))

    def forward(self, ids: Tensor, pictures: Tensor, mask: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """`ids`, `mask`, `labels` (rows, tokens); logits and loss."""
        seen = self.seeing(pictures)
        said = self.words(ids)
        if self.among:
            x = said.clone()
            starts = torch.argmax((ids == 0).int(), dim=1).unsqueeze(1)
            places = starts + torch.arange(seen.shape[1], device=ids.device).unsqueeze(0)
            rows = torch.arange(len(ids), device=ids.device).unsqueeze(1).expand_as(places)
            x[rows, places] = seen.to(x.dtype)
        else:
            x = torch.cat((seen, said), dim=1)
            mask = torch.cat((torch.ones(seen.shape[:2], device=mask.device, dtype=mask.dtype), mask), dim=1)
        logits = self.head(self._through(x, mask))
        if not self.among:
            logits = logits[:, seen.shape[1] :, :]
        loss = functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=-100)
        return logits, loss

    def _through(self, x: Tensor, mask: Tensor) -> Tensor:
        with torch.no_grad():
            places = torch.arange(x.shape[1], device=x.device).unsqueeze(0).expand(len(x), -1).reshape(-1).float()
            angles = (places.unsqueeze(-1) * self.rates).reshape(*x.shape[:2], -1)
            angles = torch.cat([angles, angles], dim=-1)
            turns = torch.cos(angles), torch.sin(angles)
        caches = []  # of a pass that only ever fills them
        for layer in self.layers:
            x, cache = layer(x, turns, mask)
            if self.among:
                caches.append(cache)
        return self.norm(x)


def measure(month: str, micro_batch: int) -> dict[str, int]:
    """Bytes at the peak with so many rows, after as many steps with half of them; `month`: may or june."""
    june = month == "june"
    side, tokens, words = (256, 128, 49153) if june else (224, 79, 49152)
    model = NanoVlm(side, words, june).to("cuda")
    held: Tensor | None = None
    for rows in (micro_batch // 2, micro_batch)[micro_batch == 1 :]:
        torch.cuda.reset_peak_memory_stats()
        held = _steps(model, rows, side, tokens, held)
        torch.cuda.empty_cache()
    return {"allocated_bytes": torch.cuda.max_memory_allocated()}


def _steps(model: NanoVlm, rows: int, side: int, tokens: int, held: Tensor | None) -> Tensor:
    """Two of them; the logits of the last.  Those of the number of rows before are held to the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    logits = held
    for _ in range(2):
        pictures = torch.zeros(rows, 3, side, side).pin_memory().to("cuda")
        ids, labels, mask = (torch.zeros(rows, tokens, dtype=torch.int64).pin_memory().to("cuda") for _ in range(3))
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            logits, loss = model(ids, pictures, mask, labels)
        loss.backward()
        optimizer.step()
    assert logits is not None
    return logits
