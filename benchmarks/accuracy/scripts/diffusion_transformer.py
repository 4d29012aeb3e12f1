"""DiT-XL/2 for images of 256 pixels: noise predicted on latents of 32 x 32, with a slower copy of the weights.

What train_original.py of chuanyangjin/fast-DiT ran out of memory with (DDP, fp32), there with torch 1.13, whose AdamW
went from weight to weight, and timm's attention, which writes its scores out.
"""

from __future__ import annotations

from copy import deepcopy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, HEADS, PATCH, SIDE, CHANNELS, CLASSES = 1152, 28, 16, 2, 32, 4, 1000
TOKENS = (SIDE // PATCH) ** 2


class Attention(nn.Module):
    """All tokens see each other, by scores."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """`x` (rows, TOKENS, WIDTH)."""
        parts = self.query_key_value(x).reshape(len(x), TOKENS, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        queries, keys, values = parts.unbind(0)
        scores = (queries @ keys.transpose(-2, -1)) * (WIDTH // HEADS) ** -0.5
        scores = scores.softmax(dim=-1)
        mixed = (scores @ values).transpose(1, 2).reshape(len(x), TOKENS, WIDTH)
        return self.out(mixed)


class Layer(nn.Module):
    """Norms without weights; the condition says how each is shifted and scaled, and how much is added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.attention = Attention()
        self.norm_2 = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """`x` (rows, TOKENS, WIDTH), `condition` (rows, WIDTH)."""
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.condition(condition).chunk(6, dim=1)
        x = x + gate_1.unsqueeze(1) * self.attention(_changed(self.norm_1(x), shift_1, scale_1))
        return x + gate_2.unsqueeze(1) * self.mlp(_changed(self.norm_2(x), shift_2, scale_2))


def _changed(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class DiffusionTransformer(nn.Module):
    """Patches of latents, layers, and for each patch a mean and a variance of the noise."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(CHANNELS, WIDTH, kernel_size=PATCH, stride=PATCH)
        self.time = nn.Sequential(nn.Linear(256, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.kinds = nn.Embedding(CLASSES + 1, WIDTH)
        self.positions = nn.Parameter(torch.zeros(1, TOKENS, WIDTH), requires_grad=False)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))
        self.head = nn.Linear(WIDTH, PATCH * PATCH * 2 * CHANNELS)

    def forward(self, latents: Tensor, times: Tensor, kinds: Tensor) -> Tensor:
        """`latents` (rows, CHANNELS, SIDE, SIDE); twice as many channels."""
        x = self.patches(latents).flatten(2).transpose(1, 2) + self.positions
        angles = times[:, None].float() * torch.ones(128, device=times.device)[None]
        condition = self.time(torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)) + self.kinds(kinds)
        for layer in self.layers:
            x = layer(x, condition)
        shift, scale = self.condition(condition).chunk(2, dim=1)
        x = self.head(_changed(self.norm(x), shift, scale))
        side = SIDE // PATCH
        x = x.reshape(len(x), side, side, PATCH, PATCH, 2 * CHANNELS)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(len(x), 2 * CHANNELS, SIDE, SIDE)


def measure(micro_batch: int) -> dict[str, int]:
    """Bytes at the peak of three steps, or of the moment at which the card was full."""
    with torch.device("meta"):
        network = DiffusionTransformer()
    network = network.to_empty(device="cuda")
    slow = deepcopy(network).requires_grad_(False)
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    try:
        _train(DistributedDataParallel(network, device_ids=[0]), slow, micro_batch)
    except torch.OutOfMemoryError:
        return {"allocated_bytes": torch.cuda.memory_allocated(), "reserved_bytes": torch.cuda.memory_reserved()}
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def _train(model: DistributedDataParallel, slow: nn.Module, rows: int) -> None:
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-4, weight_decay=0, foreach=False
    )
    for _ in range(3):
        latents = torch.zeros(rows, CHANNELS, SIDE, SIDE).to("cuda")
        kinds = torch.zeros(rows, dtype=torch.int64).to("cuda")
        times = torch.randint(0, 1000, (rows,), device="cuda")
        noise = torch.randn_like(latents)
        mean, variance = model(latents + noise, times, kinds).chunk(2, dim=1)
        loss = functional.mse_loss(mean, noise) + variance.square().mean() / 1000
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for ours, theirs in zip(model.module.parameters(), slow.parameters(), strict=True):
                theirs.mul_(0.9999).add_(ours.data, alpha=0.0001)
        loss.item()
