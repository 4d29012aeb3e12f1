"""A full fine-tune by Hugging Face's Trainer, its arguments on the command line.  Knows nothing of tonnage.

    python examples/finetune.py --model MODEL --output_dir out --per_device_train_batch_size 4 [--tokens 2048] ...

MODEL is a Hub id, or a folder with a config.json and weights; the rows are random tokens.
"""

from dataclasses import dataclass, field

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments


@dataclass
class Options:
    """What is trained on what."""

    model: str = field(metadata={"help": "a Hub id or a folder"})
    tokens: int = field(default=2048, metadata={"help": "tokens of a row"})
    rows: int = field(default=1024, metadata={"help": "rows of random tokens"})
    dtype: str = field(default="float32", metadata={"help": "in which weights are loaded"})


class Rows(Dataset):  # type: ignore[type-arg, misc]
    """Random tokens, which are their own labels."""

    def __init__(self, options: Options, words: int) -> None:
        self.tokens = torch.randint(0, words, (options.rows, options.tokens))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main() -> None:
    arguments, options = HfArgumentParser((TrainingArguments, Options)).parse_args_into_dataclasses()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
    model.config.use_cache = False
    Trainer(model=model, args=arguments, train_dataset=Rows(options, model.config.vocab_size)).train()


if __name__ == "__main__":
    main()
