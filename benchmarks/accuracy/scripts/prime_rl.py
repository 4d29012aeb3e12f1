"""prime-rl's supervised fine-tuning of January 2026, its benchmark's four steps of two micro-batches a rank.

What src/prime_rl/trainer/sft/train.py of PrimeIntellect-ai/prime-rl runs with `--bench`, `--model.compile` and
`--model.ac`: transformers' network in fp32 that FSDP2 divides and computes in bf16, each layer checkpointed and
compiled alone, gradients averaged after each micro-batch.  The loss is of fp32 logits, which the dictionary that the
forward returned keeps until the next one.  Its workflow has segments grow (.github/workflows/benchmarks.yaml).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import transformers
from benchmarks.accuracy.scripts import compilers
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

from tonnage.catalog import find_model

IMPORTS = (
    *compilers.IMPORTS,
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)

STEPS = 4
MICRO_BATCHES = 2


def measure(model: str, seq_len: int, compiled: bool) -> dict[str, int]:
    """Bytes at the peak of its steps."""
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    if compiled:
        compilers.read()
    network = _network(model, compiled)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-6, betas=(0.9, 0.999), weight_decay=0.01)
    total = torch.tensor(0.0).to("cuda")
    for _ in range(STEPS):
        for _ in range(MICRO_BATCHES):
            out = _forward(network, seq_len)
            loss = _loss(out["logits"], seq_len)
            total += loss.detach() / MICRO_BATCHES
            (loss / MICRO_BATCHES).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def _network(model: str, compiled: bool) -> nn.Module:
    """Each layer is a group, and so are embedding and head where they are two."""
    known = find_model(model)
    assert known is not None
    config = transformers.AutoConfig.for_model(**known.config())
    config.use_cache = False
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        )
    inner = network.model
    for name, layer in list(inner.layers.named_children()):
        inner.layers.register_module(name, checkpoint_wrapper(layer, preserve_rng_state=False))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in inner.layers:
        if compiled:
            layer.compile(fullgraph=False)
        fully_shard(layer, mp_policy=policy, reshard_after_forward=True)
    if not config.tie_word_embeddings:
        fully_shard(inner.embed_tokens, mp_policy=policy, reshard_after_forward=True)
        fully_shard([network.lm_head, inner.norm], mp_policy=policy, reshard_after_forward=False)
    fully_shard(network, mp_policy=policy, reshard_after_forward=True)
    network.to_empty(device="cuda")
    torch.cuda.empty_cache()
    return network


def _forward(network: nn.Module, seq_len: int) -> dict[str, Tensor]:
    """Logits (1, seq_len, words) in fp32."""
    ids = torch.zeros(1, seq_len, dtype=torch.int64).to("cuda")
    positions = torch.arange(seq_len).unsqueeze(0).to("cuda")
    logits: Tensor = network(input_ids=ids, position_ids=positions).logits
    return {"logits": logits.float().contiguous()}


def _loss(logits: Tensor, seq_len: int) -> Tensor:
    """The mean over what a mask leaves, here all."""
    following = torch.zeros(seq_len, dtype=torch.int64).to("cuda")
    mask = torch.ones(1, seq_len, dtype=torch.bool).to("cuda")
    each = functional.cross_entropy(logits.view(-1, logits.shape[-1]), following, reduction="none")
    return each.view(1, seq_len)[mask].mean()
