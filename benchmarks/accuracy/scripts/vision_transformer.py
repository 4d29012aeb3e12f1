"""torchvision's ViT-L/16 or ViT-B/16 with ten classes, trained on 224 pixels and then evaluated.

What 01 to 06 of rasbt/pytorch-memory-optim and of rasbt/cvpr2023 run, there with torchvision and Lightning Fabric.
Without accumulation the old gradients live until the next forward is over: the loops clear them between forward and
backward.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from benchmarks.accuracy.scripts import older_adam, pace
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

SIZES = {"large": (1024, 24, 16), "base": (768, 12, 12)}
"""Width, layers, heads."""
PATCH, SIDE = 16, 224
MIXED = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
"""What autocast computes in."""


class Layer(nn.Module):
    """An encoder layer as torchvision has it: norms first, torch's MultiheadAttention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        wide = 4 * width
        self.mlp = nn.Sequential(
            nn.Linear(width, wide), nn.GELU(), nn.Dropout(0), nn.Linear(wide, width), nn.Dropout(0)
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

    def __init__(self, size: str) -> None:
        super().__init__()
        width, layers, heads = SIZES[size]
        self.patches = nn.Conv2d(3, width, kernel_size=PATCH, stride=PATCH)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (SIDE // PATCH) ** 2 + 1, width))
        self.drop = nn.Dropout(0)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """`images` (rows, 3, SIDE, SIDE); logits (rows, 10)."""
        rows = images.shape[0]
        x = self.patches(images)
        x = x.reshape(rows, x.shape[1], -1)
        x = x.permute(0, 2, 1)
        x = torch.cat([self.first.expand(rows, -1, -1), x], dim=1)
        x = x + self.positions
        x = self.norm(self.layers(self.drop(x)))
        return self.head(x[:, 0])


def measure(
    micro_batch: int,
    precision: str,
    optimizer: str = "adam",
    accumulate: int = 1,
    second_temporary: bool = False,
    size: str = "large",
    strategy: str | None = None,
) -> dict[str, int]:
    """Bytes at the peak of some steps and the evaluation behind them.

    Precisions and strategies (`ddp`, `fsdp`; None: one card) are named as Fabric names them.
    """
    if second_temporary:
        older_adam.install()
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    with torch.device("meta"):  # made and cast on the host there, then copied to the card
        model = VisionTransformer(size).to(dtype)
    network = _over_ranks(model.to_empty(device="cuda"), strategy)
    kind = torch.optim.Adam if optimizer == "adam" else torch.optim.SGD
    stepper = kind(network.parameters(), lr=5e-5)
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "16-mixed")
    for step in range(3 * accumulate):
        network.train()
        images, targets = _batch(micro_batch, dtype)
        with _mixed(precision):
            logits = network(images)
        loss = functional.cross_entropy(logits.float() if precision in MIXED else logits, targets) / accumulate
        if accumulate == 1:
            stepper.zero_grad()
        scaler.scale(loss).backward()
        if step % accumulate == 0:
            scaler.step(stepper)
            scaler.update()
            if accumulate > 1:
                stepper.zero_grad()
        if strategy is not None:
            pace.end_step()
    network.eval()
    with torch.no_grad():
        for _ in range(2):
            images, targets = _batch(micro_batch, dtype)
            with _mixed(precision):
                torch.argmax(network(images), 1)
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def _mixed(precision: str) -> AbstractContextManager[object]:
    return torch.autocast("cuda", MIXED[precision]) if precision in MIXED else nullcontext()


def _over_ranks(model: nn.Module, strategy: str | None) -> nn.Module:
    """As Fabric wraps it in the middle of 2023.

    DDP is made on a stream of its own, where its copies of all weights and its first buckets then lie in vain; FSDP
    takes the network as one unit and leaves its weights in fp32 to autocast.
    """
    if strategy is None:
        return model
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    if strategy == "ddp":
        with torch.cuda.stream(torch.cuda.Stream()):
            return DistributedDataParallel(model, device_ids=[0])
    mixed = fsdp.MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    return fsdp.FullyShardedDataParallel(model, mixed_precision=mixed, device_id=0, use_orig_params=True)


def _batch(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    images = torch.zeros(rows, 3, SIDE, SIDE).to("cuda").to(dtype)
    return images, torch.zeros(rows, dtype=torch.int64).to("cuda")
