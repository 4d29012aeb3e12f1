"""Hugging Face's Trainer on a tiny causal language model, as a user would set it up.

python trainer.py OUTPUT_FOLDER [--lora] [--checkpointing] [--accumulate 2] [--workers 2]
"""

import argparse
import json

import torch
import transformers
from families import VOCABULARY, build
from torch.utils.data import Dataset


class Sentences(Dataset):  # type: ignore[type-arg]
    """Random tokens, all of one length."""

    def __init__(self, count: int, seq_len: int) -> None:
        self.tokens = torch.randint(0, VOCABULARY, (count, seq_len))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Said(transformers.TrainerCallback):
    """Prints torch's counters when training ends."""

    def on_train_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        counted = {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "steps": state.global_step,
        }
        print(json.dumps(counted))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()

    model = build("llama")
    if options.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    arguments = transformers.TrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=options.accumulate,
        gradient_checkpointing=options.checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if options.checkpointing else None,
        bf16=True,
        dataloader_num_workers=options.workers,
        dataloader_pin_memory=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Sentences(64, 128), callbacks=[Said()])
    trainer.train()


if __name__ == "__main__":
    main()
