"""A translator of a billion parameters in fp32 on 35 words, under DDP or divided by FSDP1.

What the example in Lightning Fabric's guide to FSDP runs (docs/source-fabric/advanced/model_parallel/fsdp.rst), with
the network of lightning.pytorch.demos; its figures are the peaks of `torch.cuda.memory_summary()`.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from benchmarks.accuracy.scripts import older_adam, pace
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

WORDS, WIDTH, LAYERS, TOKENS, POSITIONS = 33278, 1024, 32, 35, 5000


class Translator(nn.Module):
    """nn.Transformer between an embedding that both sides share and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.transformer = nn.Transformer(WIDTH, 64, LAYERS, LAYERS, 4 * WIDTH, dropout=0.2, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)
        self.positions: Tensor | None = None  # of sines, neither buffer nor parameter

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """`source`, `target` (1, words); log-probabilities (words, WORDS)."""
        hidden = torch.triu(torch.ones(TOKENS, TOKENS), diagonal=1) == 1
        mask = torch.zeros(TOKENS, TOKENS).masked_fill(hidden, float("-inf")).to(source.device)
        mixed = self.transformer(self._embed(source), self._embed(target), tgt_mask=mask)
        return functional.log_softmax(self.head(mixed), dim=-1).view(-1, WORDS)

    def _embed(self, words: Tensor) -> Tensor:
        if self.positions is None:
            self.positions = torch.zeros(1, POSITIONS, WIDTH, device=words.device)
        return self.drop(self.embedding(words) * math.sqrt(WIDTH) + self.positions[:, TOKENS])


def measure(strategy: str, offload: bool = False, second_temporary: bool = False) -> dict[str, int]:
    """Bytes at the peak of two steps; `strategy` is DDP or one of FSDP1's, `second_temporary` older Adam's."""
    if second_temporary:
        older_adam.install()
    dist.init_process_group("nccl")
    with torch.device("meta"):
        model = Translator()
    if strategy == "DDP":
        parallel: nn.Module = DistributedDataParallel(model.to_empty(device="cuda"), device_ids=[0])
    else:
        parallel = fsdp.FullyShardedDataParallel(
            model,
            sharding_strategy=fsdp.ShardingStrategy[strategy],
            auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}),
            cpu_offload=fsdp.CPUOffload(offload_params=offload),
            device_id=0,
            param_init_fn=lambda module: module.to_empty(device="cuda", recurse=False),
            use_orig_params=True,
        )
    optimizer = torch.optim.Adam(parallel.parameters(), lr=0.1)
    for _ in range(2):
        words = torch.zeros(TOKENS, dtype=torch.int64).to("cuda")
        output = parallel(words.unsqueeze(0), words.unsqueeze(0))
        loss = functional.nll_loss(output, words)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        pace.end_step()
    return {"allocated_bytes": torch.cuda.max_memory_allocated()}
