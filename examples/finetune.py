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
    ulysses: int = field(default=1, metadata={"help": "ranks that share each row, with DeepSpeed's ZeRO-3"})


class Rows(Dataset):  # type: ignore[type-arg, misc]
    """Random tokens, which are their own labels."""

    def __init__(self, options: Options, words: int) -> None:
        self.tokens = torch.randint(0, words, (options.rows, options.tokens))
        self.places = {"position_ids": torch.arange(options.tokens)} if options.ulysses > 1 else {}

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index], **self.places}


def share_rows(ranks: int) -> object:
    """Ulysses: each rank has a part of every row, and the attention of a part of the heads."""
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    return ParallelismConfig(sp_size=ranks, sp_backend="deepspeed", sp_handler=handler)


def main() -> None:
    arguments, options = HfArgumentParser((TrainingArguments, Options)).parse_args_into_dataclasses()
    if options.ulysses > 1:
        arguments.parallelism_config = share_rows(options.ulysses)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
    model.config.use_cache = False
    Trainer(model=model, args=arguments, train_dataset=Rows(options, model.config.vocab_size)).train()


if __name__ == "__main__":
    main()
