"""Llama 2 7B written out by hand, in bf16 over fp32 weights that FSDP divides, some steps.

What torchtitan ran on 28 March 2024 (83c879f18, pull request 165, for FSDP2; the commit before it for FSDP1), with a
nightly of what became torch 2.4: tokens of all sequences in one axis, rotary embeddings as complex numbers, a norm in
fp32, logits cast to fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed._composable.fsdp import MixedPrecisionPolicy, fully_shard  # where 2.4 has it
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional

VOCABULARY, WIDTH, INNER, LAYERS, HEADS, POSITIONS = 32000, 4096, 11008, 32, 32, 65536


class Norm(nn.Module):
    """RMS norm in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """`x` (tokens, width)."""
        wide = x.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return normal.type_as(x) * self.weight


class Attention(nn.Module):
    """Causal attention with as many keys as queries."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """`x` (tokens of all rows, width), `turns` (tokens of a row, width of half a head)."""
        queries, keys, values = self.query(x), self.key(x), self.value(x)
        queries, keys, values = (one.view(-1, len(turns), HEADS, WIDTH // HEADS) for one in (queries, keys, values))
        queries, keys = _turn(queries, keys, turns)
        parts = (one.transpose(1, 2) for one in (queries, keys, values))
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        mixed = mixed.transpose(1, 2).contiguous()
        return self.out(mixed.view(-1, WIDTH))


def _turn(queries: Tensor, keys: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """Both turned by their positions; `turns` is complex."""
    complex_queries = torch.view_as_complex(queries.float().reshape(*queries.shape[:-1], -1, 2))
    complex_keys = torch.view_as_complex(keys.float().reshape(*keys.shape[:-1], -1, 2))
    turns = turns.view(1, len(turns), 1, -1)
    turned_queries = torch.view_as_real(complex_queries * turns).flatten(3)
    turned_keys = torch.view_as_real(complex_keys * turns).flatten(3)
    return turned_queries.type_as(queries), turned_keys.type_as(keys)


class FeedForward(nn.Module):
    """Two products, one gating the other, and a third."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x` (tokens, width)."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.feed_forward_norm = Norm(), Norm()

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """`x` (tokens, width)."""
        h = x + self.attention(self.attention_norm(x), turns)
        return h + self.feed_forward(self.feed_forward_norm(h))


class Llama(nn.Module):
    """Embedding, layers, a last norm and a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("turns", torch.zeros(POSITIONS, WIDTH // HEADS // 2, dtype=torch.complex64))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = Norm()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """`ids` (rows, tokens); logits (rows, tokens, vocabulary) in fp32."""
        h = self.tokens(ids).view(-1, WIDTH)
        turns = self.turns[: ids.shape[1]]
        for layer in self.layers:
            h = layer(h, turns)
        h = self.norm(h).view(*ids.shape, WIDTH)
        return self.head(h).float()


def measure(version: int, selective: bool, micro_batch: int, seq_len: int) -> dict[str, int]:
    """Bytes at the peak of three steps; `version` of FSDP, `selective`: not all of a layer is computed again.

    Allocated are the active ones: a block that another stream may still read counts.
    """
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    torch.backends.cuda.enable_cudnn_sdp(False)  # FlashAttention, as torch of March 2024 chose
    with torch.device("meta"):
        model = Llama()
    contexts = {"context_fn": _contexts} if selective else {}
    for number, layer in enumerate(model.layers):
        model.layers[number] = checkpoint_wrapper(layer, preserve_rng_state=False, **contexts)
    divided = _divided(model) if version == 2 else _flattened(model)
    optimizer = torch.optim.AdamW(divided.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    for _ in range(3):
        ids = torch.zeros(micro_batch, seq_len, dtype=torch.int64).to("cuda")
        labels = torch.zeros(micro_batch, seq_len, dtype=torch.int64).to("cuda")
        optimizer.zero_grad()
        logits = divided(ids)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(0, 1))
        loss.backward()
        if version == 2:
            torch.nn.utils.clip_grad_norm_(divided.parameters(), 1.0, foreach=True)
        else:
            divided.clip_grad_norm_(1.0)
        optimizer.step()
        loss.item()
    return {
        "allocated_bytes": torch.cuda.memory_stats()["active_bytes.all.peak"],
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def _contexts() -> Any:
    """Kept are attention and every second product, the first of them too; torch 2.4 is told it in another way."""
    from torch.utils import checkpoint

    products: dict[bool, int] = {False: 0, True: 0}

    def is_kept(operation: Any, computed_again: bool) -> bool:
        if operation == torch.ops.aten.mm.default:
            products[computed_again] += 1
            return products[computed_again] % 2 == 1
        return operation in (
            torch.ops.aten._scaled_dot_product_efficient_attention.default,
            torch.ops.aten._scaled_dot_product_flash_attention.default,
        )

    if not hasattr(checkpoint, "CheckpointPolicy"):
        return checkpoint._pt2_selective_checkpoint_context_fn_gen(
            lambda mode, operation, *given, **named: is_kept(operation, mode == "recompute")
        )
    keep, leave = checkpoint.CheckpointPolicy.MUST_SAVE, checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    def policy(context: Any, operation: Any, *given: Any, **named: Any) -> Any:
        return keep if is_kept(operation, context.is_recompute) else leave

    return checkpoint.create_selective_checkpoint_contexts(policy)


def _divided(model: Llama) -> nn.Module:
    """By FSDP2, layer by layer; the last stays gathered after its forward, since backward begins with it."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for number, layer in enumerate(model.layers):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=number < LAYERS - 1)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model.to_empty(device="cuda")


def _flattened(model: Llama) -> fsdp.FullyShardedDataParallel:
    """By FSDP1, layer by layer."""
    return fsdp.FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(model.layers[0])}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        backward_prefetch=fsdp.BackwardPrefetch.BACKWARD_PRE,
        use_orig_params=True,
        device_id=0,
        param_init_fn=lambda module: module.to_empty(device="cuda", recurse=False),
    )
