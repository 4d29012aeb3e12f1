"""A Trainer, or a loop of its own, whose needs are known, for `tonnage tune -- python tunable.py`.

python tunable.py [--per_device_train_batch_size 4] [--long TOKENS] [--eval_rows ROWS] [--fails] [--loop]
"""

import argparse
import os

import torch
import transformers
from families import VOCABULARY, build


def rows(count: int, tokens: int, longest: int = 0) -> list[dict[str, torch.Tensor]]:
    """Return random rows, the last of which is the longest."""
    lengths = [tokens] * (count - 1) + [max(tokens, longest)]
    made = [torch.randint(0, VOCABULARY, (length,)) for length in lengths]
    return [{"input_ids": row, "labels": row} for row in made]


def pad(chosen: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    padded = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in chosen], batch_first=True)
    return {"input_ids": padded, "labels": padded}


def loop(model: torch.nn.Module, device: str) -> None:
    optimizer = torch.optim.AdamW(model.to(device).parameters())
    for row in rows(64, 32):
        words = row["input_ids"][None].to(device)
        model(input_ids=words, labels=words).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    for name in ("--long", "--eval_rows"):
        parser.add_argument(name, type=int, default=0)
    for name in ("--fails", "--loop"):
        parser.add_argument(name, action=argparse.BooleanOptionalAction, default=False)
    arguments, options = parser.parse_args_into_dataclasses()
    if options.fails and os.environ.get("RANK", "0") == "0":
        raise ValueError("the data are not there")
    model = build("llama")
    if options.loop:
        loop(model, "cuda" if torch.cuda.is_available() else "cpu")
        return
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=rows(256, 32, options.long),
        eval_dataset=rows(options.eval_rows, 32) if options.eval_rows else None,
        data_collator=pad,
    )
    trainer.train()
    trainer.save_model(os.path.join(arguments.output_dir, "final"))


if __name__ == "__main__":
    main()
