"""OLMo 1B in bf16 over fp32 weights that FSDP1 divides as one unit, some steps of several micro-batches.

What allenai/OLMo ran at c9ceb5c28 with configs/official/OLMo-1B.yaml: norms without weights, rotary embeddings in
fp32, a head that is the embedding, no activation checkpointing.  A step of theirs has 32 micro-batches a card, here
two.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.nn import functional

WIDTH, INNER, LAYERS, HEADS, VOCABULARY = 2048, 16384, 16, 16, 50304
MICRO_BATCHES = 2


def _norm(x: Tensor) -> Tensor:
    return functional.layer_norm(x, (WIDTH,))


class Layer(nn.Module):
    """Attention and a gated feed-forward, each with one product for all of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(INNER // 2, WIDTH, bias=False)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.gate_up = nn.Linear(WIDTH, INNER, bias=False)

    def forward(self, x: Tensor, sines: Tensor, cosines: Tensor) -> Tensor:
        """`x` (rows, tokens, WIDTH)."""
        parts = self.query_key_value(_norm(x)).split(WIDTH, dim=-1)
        queries, keys, values = (part.view(*x.shape[:2], HEADS, WIDTH // HEADS).transpose(1, 2) for part in parts)
        wide_queries, wide_keys = queries.float(), keys.float()
        with torch.autocast("cuda", enabled=False):
            wide_queries = _turned(wide_queries, sines, cosines)
            wide_keys = _turned(wide_keys, sines, cosines)
        queries, keys = wide_queries.type_as(queries), wide_keys.type_as(keys)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        mixed = mixed.transpose(1, 2).contiguous().view(x.shape)
        x = x + self.out(mixed)
        up, gate = self.gate_up(_norm(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


def _turned(x: Tensor, sines: Tensor, cosines: Tensor) -> Tensor:
    first, second = x.view(*x.shape[:-1], 2, x.shape[-1] // 2).unbind(dim=-2)
    return ((x * cosines) + (torch.cat((-second, first), dim=-1) * sines)).to(x.dtype)


class Olmo(nn.Module):
    """Embedding, layers, a norm, and the embedding once more as head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, ids: Tensor, sines: Tensor, cosines: Tensor) -> Tensor:
        """`ids` (rows, tokens); logits (rows, tokens, VOCABULARY)."""
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x, sines, cosines)
        return functional.linear(_norm(x), self.tokens.weight)


def measure(micro_batch: int, seq_len: int, steps: int) -> dict[str, int]:
    """Bytes at the peak of so many steps, the first of which has no optimizer states yet."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    with torch.device("meta"):
        model = Olmo()
    divided = fsdp.FullyShardedDataParallel(
        model,
        mixed_precision=fsdp.MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16
        ),
        use_orig_params=True,
        limit_all_gathers=True,
        device_id=0,
        param_init_fn=lambda module: module.to_empty(device="cuda", recurse=False),
    )
    optimizer = torch.optim.AdamW(divided.parameters(), lr=4e-4, betas=(0.9, 0.95), weight_decay=0.1)
    turns = torch.zeros(2, 1, 1, seq_len, WIDTH // HEADS, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        ids = torch.zeros(MICRO_BATCHES * micro_batch, seq_len, dtype=torch.int64).to("cuda")
        for rows in ids.split(micro_batch):
            with torch.autocast("cuda", torch.bfloat16):
                loss = _loss(divided, rows, turns)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(divided.parameters(), 1.0)
        optimizer.step()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def _loss(network: nn.Module, ids: Tensor, turns: Tensor) -> Tensor:
    logits = network(ids, *turns)
    rows = logits[..., :-1, :].contiguous()
    labels = ids[:, 1:].contiguous().view(-1)
    return functional.cross_entropy(rows.view(-1, rows.size(-1)), labels) / MICRO_BATCHES
