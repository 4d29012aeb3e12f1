"""Segment Anything's image encoder on pictures of 1,024 pixels, without gradients, with all scores of its attention.

What experiments/eval_combo.py of pytorch-labs/segment-anything-fast runs before any of its tips.  The network is
facebookresearch/segment-anything's, whose softmax is in the dtype of the weights (transformers' is in fp32).  The
rest of it (prompts, masks) needs less.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

SIDE, PATCH, WINDOW, OUT = 1024, 16, 14, 256


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of an encoder."""

    width: int
    layers: int
    heads: int

    @property
    def whole(self) -> set[int]:
        """The layers that attend to the whole picture, not to windows: every fourth part's last."""
        return {self.layers // 4 * part - 1 for part in range(1, 5)}


SHAPES = {"vit_b": Shape(width=768, layers=12, heads=12), "vit_h": Shape(width=1280, layers=32, heads=16)}


class Attention(nn.Module):
    """All scores, and learned distances along both axes added to them."""

    def __init__(self, shape: Shape, side: int) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv, self.out = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)
        self.down, self.across = (
            nn.Parameter(torch.zeros(2 * side - 1, shape.width // shape.heads)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """`x` (pictures or windows, rows, columns, width)."""
        pictures, rows, columns, _ = x.shape
        tokens = rows * columns
        qkv = self.qkv(x).reshape(pictures, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.reshape(3, pictures * self.heads, tokens, -1).unbind(0)
        scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
        scores = self._with_distances(scores, query.reshape(-1, rows, columns, query.shape[-1]))
        scores = scores.softmax(dim=-1)
        mixed = (scores @ value).view(pictures, self.heads, rows, columns, -1)
        return self.out(mixed.permute(0, 2, 3, 1, 4).reshape(pictures, rows, columns, -1))

    def _with_distances(self, scores: Tensor, query: Tensor) -> Tensor:
        """`scores` (heads, tokens, tokens), `query` (heads, rows, columns, width of a head)."""
        _, rows, columns, _ = query.shape
        down = torch.einsum("bhwc,hkc->bhwk", query, _by_distance(self.down, rows))
        across = torch.einsum("bhwc,wkc->bhwk", query, _by_distance(self.across, columns))
        apart = scores.view(-1, rows, columns, rows, columns) + down[:, :, :, :, None] + across[:, :, :, None, :]
        return apart.view(scores.shape)


def _by_distance(table: Tensor, side: int) -> Tensor:
    """Of each pair of positions, (side, side, width of a head)."""
    places = torch.arange(side)
    return table[(places[:, None] - places[None, :] + side - 1).to(table.device)]


class Layer(nn.Module):
    """Attention, within windows or not, and a feed-forward network, each behind a norm."""

    def __init__(self, shape: Shape, whole: bool) -> None:
        super().__init__()
        self.window = 0 if whole else WINDOW
        self.attention = Attention(shape, SIDE // PATCH if whole else WINDOW)
        self.norm_1, self.norm_2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.wide, self.narrow = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """`x` (pictures, rows, columns, width)."""
        shortcut = x
        x = self.norm_1(x)
        x = self._in_windows(x) if self.window else self.attention(x)
        x = shortcut + x
        return x + self.narrow(functional.gelu(self.wide(self.norm_2(x))))

    def _in_windows(self, x: Tensor) -> Tensor:
        pictures, rows, columns, width = x.shape
        more = -rows % self.window
        x = functional.pad(x, (0, 0, 0, more, 0, more))
        count = (rows + more) // self.window
        x = x.view(pictures, count, self.window, count, self.window, width)
        x = self.attention(x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, self.window, self.window, width))
        x = x.view(pictures, count, count, self.window, self.window, width)
        x = x.permute(0, 1, 3, 2, 4, 5).contiguous().view(pictures, rows + more, columns + more, width)
        return x[:, :rows, :columns, :].contiguous()


class Encoder(nn.Module):
    """Patches by a convolution, layers, and two convolutions that narrow."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        side = SIDE // PATCH
        self.patches = nn.Conv2d(3, shape.width, kernel_size=PATCH, stride=PATCH)
        self.positions = nn.Parameter(torch.zeros(1, side, side, shape.width))
        self.layers = nn.ModuleList(Layer(shape, number in shape.whole) for number in range(shape.layers))
        self.neck = nn.Sequential(
            nn.Conv2d(shape.width, OUT, kernel_size=1, bias=False),
            nn.GroupNorm(1, OUT),
            nn.Conv2d(OUT, OUT, kernel_size=3, padding=1, bias=False),
            nn.GroupNorm(1, OUT),
        )

    def forward(self, pictures: Tensor) -> Tensor:
        """`pictures` (pictures, 3, SIDE, SIDE); features (pictures, OUT, rows, columns)."""
        x = self.patches(pictures).permute(0, 2, 3, 1)
        x = x + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.neck(x.permute(0, 3, 1, 2))


def measure(shape: str, dtype: str, micro_batch: int) -> dict[str, int]:
    """Bytes at the peak of three batches, each copied to where the first one lies."""
    kind = getattr(torch, dtype)
    with torch.device("cuda"):
        model = Encoder(SHAPES[shape]).to(kind).eval()
    landing = torch.zeros(micro_batch, 3, SIDE, SIDE, dtype=kind).to("cuda")
    with torch.no_grad():
        for _ in range(3):
            landing.copy_(torch.zeros(micro_batch, 3, SIDE, SIDE, dtype=kind).pin_memory(), non_blocking=True)
            model(landing)
    return {"allocated_bytes": torch.cuda.max_memory_allocated()}
