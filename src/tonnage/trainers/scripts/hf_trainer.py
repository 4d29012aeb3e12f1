"""Trains with Hugging Face's Trainer: training_args.json has its arguments, job.json describes network and rows.

    python train.py --data FILE        (or the launcher's command)

rows.py describes FILE; without --data a few steps run on made-up rows.
"""

import json
from pathlib import Path
from typing import Any

import job
import rows
from transformers import HfArgumentParser, Trainer, TrainingArguments

HERE = Path(__file__).parent


def arguments(**others: Any) -> TrainingArguments:
    """Return training_args.json; a key that the installed transformers does not know is an error."""
    settings = json.loads((HERE / "training_args.json").read_text(encoding="utf-8"))
    if "parallelism_config" in settings:
        from accelerate import ParallelismConfig

        settings["parallelism_config"] = ParallelismConfig(**settings["parallelism_config"])
    [parsed] = HfArgumentParser(TrainingArguments).parse_dict({**settings, **others})  # type: ignore[arg-type]
    return parsed


def main() -> None:
    options = job.options()
    settings = job.read(HERE)
    tried = {} if options.data else {"max_steps": options.steps, "save_strategy": "no"}
    training = arguments(**tried)
    model = job.adapted(settings, job.network(settings, options.random_weights))
    step = training.train_batch_size * training.gradient_accumulation_steps * training.world_size
    with job.attention(settings):
        dataset = rows.dataset(settings, options.data, options.steps * step)
        trainer = Trainer(model=model, args=training, train_dataset=dataset, data_collator=dataset.batch)
        trainer.train()
    if options.data:
        trainer.save_model()


if __name__ == "__main__":
    main()
