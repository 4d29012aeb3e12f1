"""The rows that are trained on: text, cut into full rows.  Used by train.py."""

import json
from pathlib import Path
from typing import Any

import torch
from job import Job
from torch.utils.data import Dataset, default_collate


class Rows(Dataset):  # type: ignore[type-arg, misc]
    """Rows of `seq_len` tokens each, which are their own labels."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index].clone()}

    def batch(self, rows: list[dict[str, torch.Tensor]]) -> Any:
        """Return several rows as one batch."""
        return default_collate(rows)


def dataset(job: Job, data: str | None, made_up: int) -> Rows:
    """Return the text of a file in full rows, without the rest at its end; or `made_up` rows of random tokens."""
    from transformers import AutoConfig

    if data is None:
        config = AutoConfig.from_pretrained(job.model).get_text_config()
        return Rows(torch.randint(0, config.vocab_size, (made_up, job.seq_len)))
    tokens = torch.tensor(tokenised(job, texts(Path(data))), dtype=torch.int64)
    whole = len(tokens) // job.seq_len
    return Rows(tokens[: whole * job.seq_len].view(whole, job.seq_len))


def texts(path: Path) -> list[str]:
    """Return the documents of a file."""
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return [json.loads(line)["text"] for line in content.splitlines() if line.strip()]
    return [content]


def tokenised(job: Job, documents: list[str]) -> list[int]:
    """Return the tokens of all documents in a row, each followed by the tokenizer's end token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(job.model)
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    return [token for document in documents for token in [*tokenizer(document)["input_ids"], *end]]
