"""The head of a language model and its loss, alone: logits, cross-entropy in fp32, and their gradients.

What the `baseline` of apple/ml-cross-entropy's benchmark does (benchmark/memory.py there): the growth of the peak,
without inputs, after the cache was emptied.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def measure(
    tokens: int, width: int, vocabulary: int, softcap: float | None, forward: bool, backward: bool
) -> dict[str, int]:
    """Bytes by which the peak grows over forward, backward, or both."""
    with torch.device("cuda"):
        hidden = torch.zeros(tokens, width, dtype=torch.bfloat16, requires_grad=True)
        head = torch.zeros(vocabulary, width, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(tokens, dtype=torch.int64)
    for _ in range(2):  # the first call takes the workspaces of matrix products
        hidden.grad = head.grad = None
        torch.cuda.empty_cache()
        before = _peak_from_here()
        logits = hidden @ head.T
        if softcap:
            logits = torch.tanh(logits / softcap) * softcap
        loss = functional.cross_entropy(logits.float(), targets)
        del logits
        if backward:
            if not forward:
                before = _peak_from_here()
            loss.backward()
        grown = torch.cuda.memory_stats()["allocated_bytes.all.peak"] - before
        del loss
    return {"allocated_bytes": grown}


def _peak_from_here() -> int:
    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_stats()["allocated_bytes.all.peak"])
