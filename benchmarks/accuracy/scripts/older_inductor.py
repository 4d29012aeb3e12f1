"""Megatron-LM's fused cross-entropy as the Inductor of torch 2.2 compiles it: what it asks for, in its order.

Written after what torch 2.2.2 and triton 2.2.0 print on a ghost of an A100 (`TORCH_LOGS=output_code`), and
compared with what they allocate there. Kernels write in place into fp32 logits. Where Inductor has two forms of
one to choose from, it times both at the first call: with a buffer that empties the cache, and with a copy of
each tensor that the kernel writes into, one for each name that the tensor has. The sum of exponentials has two
forms because the first takes 40 registers a thread, more than let an A100 be full (`dynamic_scale_rblock`).
Later versions put those copies on the host where they would raise the peak (`copy_args_to_cpu_if_needed`).
"""

from __future__ import annotations

from typing import Any

import torch

CACHE_BYTES = 256_000_000
"""What is cleared between timed calls: `do_bench` in triton/testing.py of 2.2."""


def install() -> None:
    """From here on, in this process; the first call of each function times its kernels."""
    from megatron.core.fusions import fused_cross_entropy

    functions = Functions()
    for name in ("logits_max", "predicted_logits", "cross_entropy_loss", "gradients"):
        setattr(fused_cross_entropy, f"calculate_{name}", getattr(functions, name))


class Functions:
    """The four compiled functions, for logits of shape (tokens, batch, vocabulary of this rank)."""

    def __init__(self) -> None:
        self.timed: set[str] = set()

    def logits_max(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits in fp32 and, for each row, the largest."""
        return torch.empty_like(logits, dtype=torch.float32), _row(logits)

    def predicted_logits(
        self, logits: torch.Tensor, target: torch.Tensor, largest: torch.Tensor, start: int, end: int
    ) -> tuple[torch.Tensor, ...]:
        """The mask, the targets, two sums a row, and the exponentials in place of the logits."""
        mask = torch.empty_like(target, dtype=torch.bool)
        masked = torch.empty_like(target)
        temporaries = _row(logits), _row(logits)
        self._time("mask")
        sums = torch.empty((2 * target.shape[0], *target.shape[1:]), device=logits.device)
        self._time("sums", sums[: target.shape[0]])
        exponentials = torch.empty_like(logits)
        self._time("exponentials", logits, logits)
        del exponentials, temporaries
        return mask, masked.flatten(), sums, logits

    def cross_entropy_loss(self, exponentials: torch.Tensor, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The probabilities in place of the exponentials, and the loss of each row."""
        loss = _row(exponentials)
        self._time("loss")
        self._time("division", exponentials, exponentials)
        return exponentials, loss

    def gradients(
        self, probabilities: torch.Tensor, gradient: torch.Tensor, mask: torch.Tensor, masked: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of the logits in bf16; that of fp32 is a temporary and goes into the probabilities."""
        temporary = torch.empty_like(probabilities)
        self._time("copy")
        self._time("update", temporary)
        result = torch.empty_like(probabilities, dtype=torch.bfloat16)
        self._time("product", probabilities)
        return result

    def _time(self, kernel: str, *written: torch.Tensor) -> None:
        """What timing a kernel's forms needs, once."""
        if kernel not in self.timed:
            self.timed.add(kernel)
            cache = torch.empty(CACHE_BYTES, dtype=torch.uint8, device="cuda")
            copies: list[Any] = [torch.empty_like(tensor) for tensor in written]
            del cache, copies


def _row(logits: torch.Tensor) -> torch.Tensor:
    """A number of fp32 for each row."""
    return torch.empty(logits.shape[:-1], device=logits.device)
