"""transformers' T5 with FSDP1 around each of its blocks: forward and backward, some times, in fp32 and no optimizer.

What PyTorch's benchmarks/dynamo/distributed.py ran of TorchBench's hf_T5 in November 2022 (--fsdp --fsdp_wrap): the
configuration's defaults, made-up rows of 1,024 tokens on both sides, the mean of the logits for a loss beside the one
that the network makes of its labels, and gradients that stay.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

IMPORTS = ("transformers.models.t5.modeling_t5",)


def measure(micro_batch: int, seq_len: int) -> dict[str, int]:
    """Bytes at the peak of three times."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    config = transformers.T5Config(attn_implementation="eager", decoder_start_token_id=0, pad_token_id=0)
    with torch.device("cuda"):
        model = transformers.T5ForConditionalGeneration._from_config(config)
    blocks = ModuleWrapPolicy({type(model.encoder.block[0])})
    divided = FullyShardedDataParallel(model.train(), auto_wrap_policy=blocks, device_id=0, use_orig_params=True)
    tokens, labels = (torch.zeros(micro_batch, seq_len, dtype=torch.int64).to("cuda") for _ in range(2))
    for _ in range(3):
        _pass(divided, tokens, labels)
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def _pass(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> None:
    """What the network returned, its own loss too, is there until the end, and gone before the next forward."""
    outputs = model(input_ids=tokens, labels=labels)
    (outputs.logits.sum() / outputs.logits.numel()).backward()
