"""OPT in fp16 under DeepSpeed's ZeRO on rows that are padded to one length: fine-tuned, or as a judge of answers.

What applications/DeepSpeed-Chat of microsoft/DeepSpeedExamples runs in its first two steps.  A judge sees wanted and
unwanted answers in one batch and has one number a token in place of logits.  What a forward returned lives until the
next one has returned.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.nn import functional

IMPORTS = ("transformers.models.opt.modeling_opt", "deepspeed")

SIZES: dict[str, dict[str, Any]] = {
    "opt-1.3b": {"hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24, "num_attention_heads": 32},
    "opt-350m": {
        "hidden_size": 1024,
        "ffn_dim": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "word_embed_proj_dim": 512,
        "do_layer_norm_before": False,
    },
}
VOCABULARY = 50272
VERSION = "4.46"
"""The last transformers whose attention in OPT is that of 2023."""
LAUNCHER = {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
STEPS = 3


class Judge(nn.Module):
    """A network without head and one number for each of its tokens."""

    def __init__(self, network: nn.Module, width: int) -> None:
        super().__init__()
        self.number = nn.Linear(width, 1, bias=False)
        self.network = network

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """Losses over the second half of each pair of rows, wanted ones first."""
        states = self.network(input_ids, attention_mask=attention_mask, use_cache=False)[0]
        numbers = self.number(states).squeeze(-1)
        pairs, length = numbers.shape[0] // 2, numbers.shape[1]
        loss = torch.zeros((), device=numbers.device)
        for wanted, unwanted in zip(numbers[:pairs], numbers[pairs:], strict=True):
            loss = loss - functional.logsigmoid(wanted[length // 2 :] - unwanted[length // 2 :]).mean()
        return {"loss": loss / pairs, "chosen": numbers[:pairs, -1], "rejected": numbers[pairs:, -1]}


def measure(task: str, size: str, stage: int, micro_batch: int, seq_len: int) -> dict[str, int]:
    """Bytes at the peak of some steps and after one; `task` is finetune or judge.

    Raises RuntimeError for a transformers whose OPT is another network.
    """
    if not transformers.__version__.startswith(f"{VERSION}."):
        raise RuntimeError(f"measured with a transformers up to {VERSION}, whose network is another one")
    import deepspeed

    os.environ.update(LAUNCHER)
    deepspeed.init_distributed(dist_backend="nccl")
    engine = _engine(_network(task, size), stage, micro_batch)
    loop = {"finetune": _finetune, "judge": _judge}[task]
    loop(engine, micro_batch, seq_len)
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "after_bytes": AFTER[-1],
    }


AFTER: list[int] = []
"""What is allocated when DeepSpeed's timer prints it, at the end of each step."""


def _network(task: str, size: str) -> nn.Module:
    config = transformers.OPTConfig(vocab_size=VOCABULARY, use_cache=False, **SIZES[size])
    kind = transformers.OPTModel if task == "judge" else transformers.OPTForCausalLM
    with torch.device("meta"):
        network = kind._from_config(config, attn_implementation="eager")
        whole = Judge(network, config.word_embed_proj_dim) if task == "judge" else network
    whole = whole.half().to_empty(device="cpu")
    if task != "judge":
        whole.tie_weights()
    return whole


def _engine(network: nn.Module, stage: int, micro_batch: int) -> Any:
    import deepspeed
    from deepspeed.ops.adam import FusedAdam

    decayed = [p for name, p in network.named_parameters() if p.ndim > 1]
    others = [p for name, p in network.named_parameters() if p.ndim <= 1]
    optimizer = FusedAdam([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-5, betas=(0.9, 0.95))
    engine, *_ = deepspeed.initialize(
        model=network,
        optimizer=optimizer,
        config={
            "train_batch_size": micro_batch * dist.get_world_size(),
            "train_micro_batch_size_per_gpu": micro_batch,
            "steps_per_print": 10,
            "zero_optimization": {"stage": stage},
            "fp16": {"enabled": True, "loss_scale_window": 100},
            "gradient_clipping": 1.0,
        },
    )
    return engine


def _finetune(engine: Any, micro_batch: int, seq_len: int) -> None:
    engine.train()
    for _ in range(STEPS):
        batch = _batch(micro_batch, seq_len)
        outputs = engine(**batch, labels=batch["input_ids"], use_cache=False)
        loss = outputs.loss
        engine.backward(loss)
        engine.step()
        AFTER.append(torch.cuda.memory_allocated())


def _judge(engine: Any, micro_batch: int, seq_len: int) -> None:
    engine.train()
    for _ in range(STEPS):
        outputs = engine(**_batch(2 * micro_batch, seq_len))
        loss = outputs["loss"]
        engine.backward(loss)
        engine.step()
        AFTER.append(torch.cuda.memory_allocated())


def _batch(rows: int, seq_len: int) -> dict[str, Tensor]:
    ids = torch.zeros(rows, seq_len, dtype=torch.int64)
    return {"input_ids": ids.to("cuda"), "attention_mask": torch.ones_like(ids).to("cuda")}
