"""A Trainer whose arguments are the command line's, as in Hugging Face's examples.

python flags.py --output_dir FOLDER [--per_device_train_batch_size 4] [--rows 64] [--tokens 128] ...
"""

from dataclasses import dataclass

from families import FAMILIES
from trainer import Sentences
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


@dataclass
class Data:
    """What is made up."""

    rows: int = 64
    tokens: int = 128
    width: int = 64
    layers: int = 2


def main() -> None:
    arguments, data = HfArgumentParser((TrainingArguments, Data)).parse_args_into_dataclasses()
    size = {"hidden_size": data.width, "intermediate_size": 2 * data.width, "num_hidden_layers": data.layers}
    config = LlamaConfig(**{**FAMILIES["llama"][2], **size}, use_cache=False)
    trainer = Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=Sentences(data.rows, data.tokens))
    trainer.train()


if __name__ == "__main__":
    main()
