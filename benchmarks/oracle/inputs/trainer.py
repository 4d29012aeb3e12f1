"""Hugging Face's Trainer on a Llama of 110 M parameters and random tokens; its arguments are TrainingArguments.

python trainer.py --output_dir out [--tokens 512] [--rank 0] ...
"""

from dataclasses import dataclass, field

import torch
from torch.utils.data import Dataset
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

WORDS = 32000


@dataclass
class Options:
    """What is trained on what."""

    tokens: int = field(default=512, metadata={"help": "tokens of a row"})
    rank: int = field(default=0, metadata={"help": "rank of LoRA's adapters; 0: none"})


class Rows(Dataset):  # type: ignore[type-arg, misc]
    """Random tokens, which are their own labels."""

    def __init__(self, tokens: int) -> None:
        self.rows = torch.randint(0, WORDS, (256, tokens))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    arguments, options = HfArgumentParser((TrainingArguments, Options)).parse_args_into_dataclasses()
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 9, "num_attention_heads": 12}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, use_cache=False, **sizes))
    if options.rank:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=options.rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    Trainer(model=model, args=arguments, train_dataset=Rows(options.tokens)).train()


if __name__ == "__main__":
    main()
