"""A stack of plain Transformer layers, for both ways of training it under a budget; alone: torch's own way.

    python benchmarks/budget_network.py FRACTION

trains it for two steps on a GPU, compiled, with `torch._functorch.config.activation_memory_budget` set.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config

WIDTH, HEADS, LAYERS, SEQUENCES, TOKENS = 512, 8, 16, 8, 512


class Layer(nn.Module):
    """Attention and a gated MLP, each behind a norm and beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleDict({name: nn.RMSNorm(WIDTH) for name in ("attention", "mlp")})
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        parts = self.qkv(self.norms["attention"](x)).view(b, s, 3, HEADS, WIDTH // HEADS).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(b, s, WIDTH))
        gate, up = self.up(self.norms["mlp"](x)).chunk(2, dim=-1)
        return x + self.down(nn.functional.silu(gate) * up)


class Network(nn.Module):
    """Layers, and a loss of what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()

    def batch(self, job: Any) -> dict[str, Tensor]:
        return {"x": torch.randn(job.micro_batch, job.seq_len, WIDTH, dtype=torch.bfloat16)}


def make() -> Network:
    return Network()


def train(fraction: float) -> None:
    """Two steps, compiled for torch's partitioner without a compiler behind it."""
    config.activation_memory_budget = fraction
    network = make().to("cuda", torch.bfloat16)
    run = torch.compile(network, backend="aot_eager_decomp_partition")
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    for _ in range(2):
        run(torch.randn(SEQUENCES, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    train(float(sys.argv[1]))
