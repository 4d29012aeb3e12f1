"""torchvision's ViT-L/16 with ten classes, trained on 224 pixels and then evaluated.

What 01 to 06 of rasbt/pytorch-memory-optim run, there with torchvision and Lightning Fabric.  Without accumulation
the old gradients live until the next forward is over: the loops clear them between forward and backward.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from benchmarks.accuracy.scripts import older_adam
from torch import Tensor, nn
from torch.nn import functional

WIDTH, LAYERS, HEADS, PATCH, SIDE = 1024, 24, 16, 16, 224


class Layer(nn.Module):
    """An encoder layer as torchvision has it: norms first, torch's MultiheadAttention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        wide = 4 * WIDTH
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, wide), nn.GELU(), nn.Dropout(0), nn.Linear(wide, WIDTH), nn.Dropout(0)
        )
        self.drop = nn.Dropout(0)

    def forward(self, given: Tensor) -> Tensor:
        """`given` (rows, patches + 1, width)."""
        x = self.norm_1(given)
        x, _ = self.attention(x, x, x, need_weights=False)
        x = self.drop(x)
        x = x + given
        y = self.norm_2(x)
        y = self.mlp(y)
        return x + y


class VisionTransformer(nn.Module):
    """Patches by a convolution, a class token, layers, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, kernel_size=PATCH, stride=PATCH)
        self.first = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.zeros(1, (SIDE // PATCH) ** 2 + 1, WIDTH))
        self.drop = nn.Dropout(0)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        """`images` (rows, 3, SIDE, SIDE); logits (rows, 10)."""
        rows = images.shape[0]
        x = self.patches(images)
        x = x.reshape(rows, WIDTH, -1)
        x = x.permute(0, 2, 1)
        x = torch.cat([self.first.expand(rows, -1, -1), x], dim=1)
        x = x + self.positions
        x = self.norm(self.layers(self.drop(x)))
        return self.head(x[:, 0])


def measure(
    micro_batch: int, precision: str, optimizer: str = "adam", accumulate: int = 1, second_temporary: bool = False
) -> dict[str, int]:
    """Bytes at the peak of some steps and the evaluation behind them; precisions are named as Fabric names them."""
    if second_temporary:
        older_adam.install()
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    mixed = precision == "16-mixed"
    with torch.device("meta"):  # made and cast on the host there, then copied to the card
        model = VisionTransformer().to(dtype)
    model.to_empty(device="cuda")
    kind = torch.optim.Adam if optimizer == "adam" else torch.optim.SGD
    stepper = kind(model.parameters(), lr=5e-5)
    scaler = torch.amp.GradScaler("cuda", enabled=mixed)
    for step in range(3 * accumulate):
        model.train()
        images, targets = _batch(micro_batch, dtype)
        with torch.autocast("cuda", torch.float16) if mixed else nullcontext():
            logits = model(images)
        loss = functional.cross_entropy(logits.float() if mixed else logits, targets) / accumulate
        if accumulate == 1:
            stepper.zero_grad()
        scaler.scale(loss).backward()
        if step % accumulate == 0:
            scaler.step(stepper)
            scaler.update()
            if accumulate > 1:
                stepper.zero_grad()
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            images, targets = _batch(micro_batch, dtype)
            with torch.autocast("cuda", torch.float16) if mixed else nullcontext():
                torch.argmax(model(images), 1)
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def _batch(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    images = torch.zeros(rows, 3, SIDE, SIDE).to("cuda").to(dtype)
    return images, torch.zeros(rows, dtype=torch.int64).to("cuda")
