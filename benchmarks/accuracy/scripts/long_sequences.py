"""Llama 3.1 8B in bf16 on one long sequence a card under DeepSpeed's ZeRO, with Adam on the host or on the card.

What two programs of insights/when-to-upgrade-gpus in stas00/ml-engineering run: transformers' network with
FlashAttention 3 (Hopper) or 4 (Blackwell), Liger's kernels or none of them, layers that may run again without
re-entering.  benchmark.py keeps what a forward returned until the next one has returned, and wants results that
repeat; bench_decompose.py keeps the loss alone.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import transformers
from benchmarks.accuracy.scripts import compilers, flash_attention_3
from torch import nn

from tonnage.catalog.models import find_model

IMPORTS = (
    "transformers.models.llama.modeling_llama",
    "deepspeed",
    "deepspeed.moe.ep_router",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "liger_kernel.transformers",
    "liger_kernel.transformers.monkey_patch",
    "liger_kernel.transformers.model.llama",
)

MODEL = "llama-3.1-8b"
LAUNCHER = {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""What cuBLAS wants for results that repeat."""
STEPS = 3


def measure(seq_len: int, stage: int, offload: bool, again: bool, liger: bool, program: str) -> dict[str, int]:
    """Bytes at the peak of some steps; `again`: layers run again; `program`: benchmark or decompose."""
    import deepspeed

    os.environ.update(LAUNCHER | CUBLAS)
    deepspeed.init_distributed(dist_backend="nccl")
    torch.cuda.set_device(0)
    if program == "benchmark":
        torch.backends.cudnn.deterministic = True
        torch.use_deterministic_algorithms(True, warn_only=True)
    network = _network(again, liger)
    engine, *_ = deepspeed.initialize(
        model=network, model_parameters=network.parameters(), config=_settings(stage, offload)
    )
    {"benchmark": _benchmark, "decompose": _decompose}[program](engine, network.config.vocab_size - 256, seq_len)
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def rehearse() -> None:
    """What Triton would read in each job."""
    compilers.read()


def _benchmark(engine: Any, words: int, seq_len: int) -> None:
    for _ in range(STEPS):
        ids = torch.randint(0, words, (1, seq_len)).to("cuda")
        out = engine(input_ids=ids, labels=ids)
        engine.backward(out.loss)
        engine.step()
        torch.cuda.synchronize()
        peak = torch.tensor(torch.cuda.max_memory_reserved() / 2**30, device="cuda")
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)


def _decompose(engine: Any, words: int, seq_len: int) -> None:
    ids = torch.randint(0, words, (1, seq_len), device="cuda")
    for _ in range(STEPS):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
    torch.cuda.synchronize()


def _network(again: bool, liger: bool) -> nn.Module:
    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    flash_attention_3.install()
    known = find_model(MODEL)
    assert known is not None
    config = transformers.AutoConfig.for_model(**known.config())
    with torch.device("meta"):
        network = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    network = network.to_empty(device="cpu")
    network.config._attn_implementation = "flash_attention_3"  # past the question whether its package is there
    network.model.rotary_emb = type(network.model.rotary_emb)(config)  # whose numbers are fp32
    if again:
        network.config.use_cache = False
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    network.train()
    return network


def _settings(stage: int, offload: bool) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8}},
        "zero_optimization": zero,
    }
