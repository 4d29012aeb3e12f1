"""torchtitan's small Llama 3 in bf16 over fp32 weights that FSDP2 divides, some steps.

What its train.py ran in November 2025 with train_configs/debug_model.toml: every second layer checkpointed, AdamW
fused, cuDNN's attention first, the logits freed before backward.  Its launcher asks for expandable segments by a name
that the CUDA allocator of torch 2.9 does not read, so there were none.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

WIDTH, INNER, LAYERS, HEADS, VOCABULARY = 256, 768, 6, 16, 2048
ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class Layer(nn.Module):
    """Attention with as many keys as queries and a gated feed-forward, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.down, self.up = (
            nn.Linear(WIDTH, INNER, bias=False),
            nn.Linear(INNER, WIDTH, bias=False),
            nn.Linear(WIDTH, INNER, bias=False),
        )
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-5)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """`x` (rows, tokens, WIDTH)."""
        h = x + self._attention(self.attention_norm(x), turns)
        return h + self._feed_forward(self.feed_forward_norm(h))

    def _attention(self, x: Tensor, turns: Tensor) -> Tensor:
        queries, keys, values = self.query(x), self.key(x), self.value(x)
        queries, keys, values = (part.view(*x.shape[:2], HEADS, -1) for part in (queries, keys, values))
        queries, keys = _turned(queries, keys, turns)
        with sdpa_kernel(ATTENTION, set_priority=True):
            mixed = functional.scaled_dot_product_attention(
                queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), is_causal=True
            )
        return self.out(mixed.transpose(1, 2).contiguous().view(x.shape))

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def _turned(queries: Tensor, keys: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    complex_queries = torch.view_as_complex(queries.float().reshape(*queries.shape[:-1], -1, 2))
    complex_keys = torch.view_as_complex(keys.float().reshape(*keys.shape[:-1], -1, 2))
    turns = turns[: queries.shape[1]].view(1, queries.shape[1], 1, -1)
    turned_queries = torch.view_as_real(complex_queries * turns).flatten(3)
    turned_keys = torch.view_as_real(complex_keys * turns).flatten(3)
    return turned_queries.type_as(queries), turned_keys.type_as(keys)


class Llama(nn.Module):
    """Embedding, layers, a norm and a head of its own."""

    def __init__(self, seq_len: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer(
            "turns", torch.zeros(seq_len, WIDTH // HEADS // 2, dtype=torch.complex64), persistent=False
        )
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """`ids` (rows, tokens); logits (rows, tokens, VOCABULARY)."""
        h = self.tokens(ids)
        for layer in self.layers:
            h = layer(h, self.turns)
        return self.head(self.norm(h))


def measure(micro_batch: int, seq_len: int, steps: int) -> dict[str, int]:
    """Bytes at the peak of so many steps."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    with torch.device("meta"):
        model = Llama(seq_len)
    for number in range(1, LAYERS, 2):
        model.layers[number] = checkpoint_wrapper(model.layers[number], preserve_rng_state=False)
    _divide(model)
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for _ in range(steps):
        optimizer.zero_grad()
        ids = torch.zeros(micro_batch, seq_len, dtype=torch.int64).to("cuda")
        labels = torch.zeros(micro_batch, seq_len, dtype=torch.int64).to("cuda")
        logits = model(ids)
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
        del logits
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def _divide(model: Llama) -> None:
    """The embedding, each layer, norm and head together, and what is left."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model.tokens, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard([model.norm, model.head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
