"""A loop written with accelerate: `accelerate launch accelerated.py`, or plain python."""

import json

import torch
from accelerate import Accelerator
from families import build
from torch.utils.data import DataLoader
from trainer import Sentences


def main() -> None:
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    model = build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(Sentences(48, 128), batch_size=4, pin_memory=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    mean = accelerator.gather(loss.detach()[None]).mean().item()
    accelerator.print(
        json.dumps(
            {
                "allocated": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(),
                "processes": accelerator.num_processes,
                "loss": mean,
            }
        )
    )


if __name__ == "__main__":
    main()
