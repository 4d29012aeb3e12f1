"""A vision Transformer in fp16 that learns from a slower copy of itself, on large and small crops of each image.

What main_dino.py of facebookresearch/dino runs by default, there with torch 1.7: the student, under DDP, sees all
crops, the teacher the large ones; both end in a head with 65,536 outputs, whose norm is not trained.  In the first
epoch the last product of that head is not trained at all.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.accuracy.scripts import older_softmax, pace
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, HEADS, PATCH, LARGE, SMALL = 384, 12, 6, 16, 224, 96
LARGE_CROPS, SMALL_CROPS, OUTPUTS, DROPPED = 2, 8, 65536, 0.1


class Layer(nn.Module):
    """Norms first, scores written out, and whole rows left out at random."""

    def __init__(self, dropped: float) -> None:
        super().__init__()
        self.dropped = dropped
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
        self.query_key_value, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.none = nn.Dropout(0.0)
        self.up, self.gelu, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """`x` (rows, tokens, WIDTH)."""
        x = x + self._without_some(self._attention(self.norm_1(x)))
        y = self.none(self.gelu(self.up(self.norm_2(x))))
        return x + self._without_some(self.none(self.down(y)))

    def _attention(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        parts = self.query_key_value(x).reshape(rows, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        queries, keys, values = parts.unbind(0)
        scores = (queries @ keys.transpose(-2, -1)) * (WIDTH // HEADS) ** -0.5
        scores = self.none(scores.softmax(dim=-1))
        mixed = (scores @ values).transpose(1, 2).reshape(rows, tokens, WIDTH)
        return self.none(self.out(mixed))

    def _without_some(self, x: Tensor) -> Tensor:
        if self.dropped == 0 or not self.training:
            return x
        kept = 1 - self.dropped
        some = kept + torch.rand((x.shape[0], 1, 1), dtype=x.dtype, device=x.device)
        some.floor_()
        return x.div(kept) * some


class Backbone(nn.Module):
    """Patches, a class token, positions stretched to the size of the crop, layers, a norm."""

    def __init__(self, dropped: float) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.zeros(1, (LARGE // PATCH) ** 2 + 1, WIDTH))
        self.patches = nn.Conv2d(3, WIDTH, kernel_size=PATCH, stride=PATCH)
        self.layers = nn.ModuleList(Layer(dropped * n / (LAYERS - 1)) for n in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.none = nn.Dropout(0.0)

    def forward(self, images: Tensor) -> Tensor:
        """`images` (rows, 3, side, side); the class tokens (rows, WIDTH)."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(len(x), -1, -1), x), dim=1)
        x = self.none(x + self._stretched(images.shape[-1] // PATCH))
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)[:, 0]

    def _stretched(self, side: int) -> Tensor:
        large = LARGE // PATCH
        if side == large:
            return self.positions
        grid = self.positions[:, 1:].reshape(1, large, large, WIDTH).permute(0, 3, 1, 2)
        grid = functional.interpolate(grid, scale_factor=(side + 0.1) / large, mode="bicubic")
        grid = grid.permute(0, 2, 3, 1).view(1, -1, WIDTH)
        return torch.cat((self.positions[:, :1], grid), dim=1)


class Network(nn.Module):
    """A backbone for crops of each size in turn, and a head for all of them at once."""

    def __init__(self, dropped: float = 0.0) -> None:
        super().__init__()
        self.backbone = Backbone(dropped)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2048), nn.GELU(), nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 256)
        )
        self.last = nn.utils.weight_norm(nn.Linear(256, OUTPUTS, bias=False))

    def forward(self, crops: list[Tensor]) -> Tensor:
        """`crops` sorted by size, each (rows, 3, side, side)."""
        found = torch.empty(0, device="cuda")
        for side in dict.fromkeys(crop.shape[-1] for crop in crops):
            alike = torch.cat([crop for crop in crops if crop.shape[-1] == side])
            found = torch.cat((found, self.backbone(alike)))
        return self.last(functional.normalize(self.mlp(found), dim=-1, p=2))


def measure(micro_batch: int, first_epoch: bool) -> dict[str, int]:
    """Bytes at the peak of three steps of fp16; `first_epoch`: the last product has no gradients."""
    older_softmax.install()
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    with torch.device("meta"):
        student, teacher = Network(DROPPED), Network()
    student, teacher = student.to_empty(device="cuda"), teacher.to_empty(device="cuda")
    student.last.weight_g.requires_grad_(False)
    parallel = DistributedDataParallel(student, device_ids=[0])
    teacher.requires_grad_(False)
    center = torch.zeros(1, OUTPUTS, device="cuda")
    optimizer = torch.optim.AdamW([p for p in parallel.parameters() if p.requires_grad], foreach=False)
    scaler = torch.amp.GradScaler("cuda")
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        sides = [LARGE] * LARGE_CROPS + [SMALL] * SMALL_CROPS
        crops = [torch.zeros(micro_batch, 3, side, side).to("cuda") for side in sides]
        with torch.autocast("cuda", torch.float16):
            targets = teacher(crops[:LARGE_CROPS])
            outputs = parallel(crops)
            loss = _loss(outputs, targets, center)
        loss.item()
        optimizer.zero_grad(set_to_none=False)
        scaler.scale(loss).backward()
        if first_epoch:
            student.last.weight_v.grad = None
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for ours, theirs in zip(student.parameters(), teacher.parameters(), strict=True):
                theirs.data.mul_(0.996).add_(0.004 * ours.detach().data)
        pace.end_step()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def _loss(outputs: Tensor, targets: Tensor, center: Tensor) -> Tensor:
    """Every crop's outputs beside the targets of each large crop but itself."""
    crops = (outputs / 0.1).chunk(LARGE_CROPS + SMALL_CROPS)
    wanted = functional.softmax((targets - center) / 0.04, dim=-1).detach().chunk(LARGE_CROPS)
    total: Tensor | None = None
    for number, target in enumerate(wanted):
        for other, crop in enumerate(crops):
            if other != number:
                loss = torch.sum(-target * functional.log_softmax(crop, dim=-1), dim=-1).mean()
                total = loss if total is None else total + loss
    assert total is not None
    with torch.no_grad():
        mean = torch.sum(targets, dim=0, keepdim=True)
        dist.all_reduce(mean)
        center.copy_(center * 0.9 + mean / len(targets) * 0.1)
    return total / (LARGE_CROPS * (LARGE_CROPS + SMALL_CROPS - 1))
