"""A loop that asks for more than the card has: in its forward, its backward or its optimizer; or adapts to the card.

python too_big.py forward|backward|optimizer|adapting|skipping|giving-up|exiting|ending
"""

import json
import sys

import torch
from torch import nn

GIB = 2**30


class Widen(nn.Module):
    """Keeps `forward_bytes` for the backward pass, which asks for `backward_bytes` at once."""

    def __init__(self, forward_bytes: int, backward_bytes: int) -> None:
        super().__init__()
        self.forward_bytes, self.backward_bytes = forward_bytes, backward_bytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Asking.apply(x, self.forward_bytes, self.backward_bytes)


class Asking(torch.autograd.Function):
    """The identity, with memory."""

    @staticmethod
    def forward(ctx, x, forward_bytes, backward_bytes):  # type: ignore[no-untyped-def]
        ctx.backward_bytes = backward_bytes
        ctx.save_for_backward(torch.empty(forward_bytes, dtype=torch.uint8, device=x.device))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        torch.empty(ctx.backward_bytes, dtype=torch.uint8, device=gradient.device)
        return gradient, None, None


def train(model: nn.Module, micro_batch: int, steps: int) -> None:
    """A few steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(micro_batch, model[0].in_features, device="cuda")).square().mean().backward()
        optimizer.step()


def skip(batches: int) -> None:
    """Every other batch is too large for the card, before the network sees it, and passed over."""
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in range(batches):
        try:
            rows = torch.zeros(2**40 if batch % 2 else 4, 8, device="cuda")
        except torch.OutOfMemoryError:
            continue
        model(rows).sum().backward()
        optimizer.step()


def main() -> None:
    where = sys.argv[1]
    if where == "skipping":
        skip(20)
        return
    if where == "adapting":
        model = nn.Sequential(nn.Linear(1024, 16384), nn.Linear(16384, 16384)).cuda()
        micro_batch = 2**18
        while True:
            try:
                train(model, micro_batch, 2)
                break
            except torch.OutOfMemoryError:
                micro_batch //= 2
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        print(json.dumps({"micro_batch": micro_batch, "allocated": torch.cuda.max_memory_allocated()}))
        return
    if where in ("giving-up", "exiting", "ending"):
        try:
            torch.empty(2**42, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            if where != "giving-up":
                sys.exit(1 if where == "exiting" else 0)
        raise RuntimeError("No batch size fits.")
    if where == "wrapped":  # as torch's pipelines do
        try:
            torch.empty(2**42, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            raise RuntimeError("Failed to run a stage.") from error
    total = torch.cuda.get_device_properties(0).total_memory
    if where == "forward":
        train(nn.Sequential(nn.Linear(8, 8), Widen(2 * total, 8)).cuda(), 4, 2)
    elif where == "backward":
        train(nn.Sequential(nn.Linear(8, 8), Widen(8, 2 * total)).cuda(), 4, 2)
    else:
        width = int((total / 4 / 2.5) ** 0.5)  # weights and gradients fit, AdamW's states do not
        train(nn.Sequential(nn.Linear(width, width, bias=False)).cuda(), 1, 2)


if __name__ == "__main__":
    main()
