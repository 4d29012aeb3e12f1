"""A loop with accelerate's Accelerator, which accumulates two micro-batches."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from trainer import WORDS, Rows
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, use_cache=False, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Rows(128), batch_size=4))
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
