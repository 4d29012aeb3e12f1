"""Forward and backward of a transformers network whose loss is the sum of its logits, without an optimizer.

What the scripts behind the tables "eager peak mem, sdpa peak mem" of transformers' model pages run
(gist.github.com/fxmarty/7e75cc3942d6974e4849093ebea0a331): the peak is read once gradients exist and the cache was
emptied, and what a step returned lives until the next one has returned.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

IMPORTS = tuple(f"transformers.models.{name}.modeling_{name}" for name in ("albert", "bert", "distilbert"))
STEPS = 3


def measure(
    network: str, config: dict[str, Any], attention: str, micro_batch: int, seq_len: int, version: str | None = None
) -> dict[str, int]:
    """Bytes at the peak of a step in fp16.

    `network` is a class of transformers; `version` is that of transformers without which the network is another one.
    """
    if version and not transformers.__version__.startswith(f"{version}."):
        raise RuntimeError(f"measured with transformers {version}, whose network is another one")
    kind = getattr(transformers, network)
    with torch.device("cuda"):
        model = kind._from_config(
            kind.config_class(**config), attn_implementation=attention, torch_dtype=torch.float16
        )
    ids = torch.randint(model.config.vocab_size - 1, (micro_batch, seq_len)).to("cuda")
    model.train()
    _take_steps(model, ids)
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.empty_cache()
    _take_steps(model, ids)
    return {"allocated_bytes": torch.cuda.max_memory_allocated()}


def _take_steps(model: Any, ids: torch.Tensor) -> None:
    for _ in range(STEPS):
        model.zero_grad()
        outputs = model(input_ids=ids)
        loss = outputs.logits.sum()
        loss.backward()
