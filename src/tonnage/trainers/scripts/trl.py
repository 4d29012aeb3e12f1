"""Trains with TRL's SFTTrainer: sft_config.json has its arguments, job.json describes network and rows.

    python train.py --data texts.jsonl        (or the launcher's command)

Rows are full sequences; for conversations, drop dataset_kwargs from sft_config.json and give SFTTrainer your own
dataset.  Without --data a few steps run on made-up rows.
"""

import json
from pathlib import Path
from typing import Any

import job
import rows
from datasets import Dataset
from transformers import AutoTokenizer, HfArgumentParser, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

HERE = Path(__file__).parent


def arguments(**others: Any) -> SFTConfig:
    """Return sft_config.json; a key that the installed TRL does not know is an error."""
    settings = json.loads((HERE / "sft_config.json").read_text(encoding="utf-8"))
    if "parallelism_config" in settings:
        from accelerate import ParallelismConfig

        settings["parallelism_config"] = ParallelismConfig(**settings["parallelism_config"])
    [parsed] = HfArgumentParser(SFTConfig).parse_dict({**settings, **others})  # type: ignore[arg-type]
    return parsed


def tokenizer(settings: job.Job, made_up: bool) -> Any:
    """Return the network's tokenizer; for made-up rows one with two words."""
    if not made_up:
        return AutoTokenizer.from_pretrained(settings.model)
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def main() -> None:
    options = job.options()
    settings = job.read(HERE)
    tried = {} if options.data else {"max_steps": options.steps, "save_strategy": "no"}
    training = arguments(**tried)
    step = training.train_batch_size * training.gradient_accumulation_steps * training.world_size
    tokens = rows.dataset(settings, options.data, options.steps * step).tokens.tolist()
    network = job.network(settings, options.random_weights)
    adapters = None
    if settings.lora is not None:
        import peft

        adapters = peft.LoraConfig(**settings.lora)
        if settings.cast_unquantized:
            network = peft.prepare_model_for_kbit_training(network, use_gradient_checkpointing=False)
    with job.attention(settings):
        trainer = SFTTrainer(
            model=network,
            args=training,
            train_dataset=Dataset.from_dict({"input_ids": tokens, "labels": tokens}),
            processing_class=tokenizer(settings, options.data is None),
            peft_config=adapters,
        )
        trainer.train()
    if options.data:
        trainer.save_model()


if __name__ == "__main__":
    main()
