"""Training data: text and JSON lines as documents of token ids, with the labels that the loss uses.

    notes.txt     one document
    train.jsonl   a document a line: {"text": "..."}, or {"messages": [{"role": "user", "content": "..."}, ...]}
    folder/       all such files in it, in the order of their names

Messages go through the chat template of the tokenizer, and the loss uses what the assistant says alone.  Lines that
cannot be used are counted and named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch

from tonnage.errors import UnreadableFile, UsageError
from tonnage.job import IGNORED_LABEL
from tonnage.train.tokens import Tokenizer
from tonnage.units import pluralise

SUFFIXES: Final = (".txt", ".jsonl")
"""Endings of the files that are read."""

ASSISTANT: Final = "assistant"
"""Role of the messages that the loss uses."""

_HALF: Final = re.compile("[\ud800-\udfff]")
"""Half of a character of UTF-16, which JSON can escape and no text has."""

_NAMED: Final = 5
"""Unusable lines that are named; the others are counted."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """The tokens of one text or conversation."""

    ids: torch.Tensor
    """Token ids."""
    labels: torch.Tensor
    """The same, or IGNORED_LABEL where the loss leaves a token out."""
    is_whole: bool
    """True for a conversation, which is not split."""
    answers_left_out: int = 0
    """Answers of a conversation without labels, since the chat template changes them when messages follow."""


@dataclass(kw_only=True)
class Corpus:
    """The documents of a data set, with what could not be used of it."""

    documents: list[Document] = field(default_factory=list)
    """The documents in the order of the files."""
    unusable: list[str] = field(default_factory=list)
    """Lines that were left out: `train.jsonl:3 (no JSON)`."""
    cut: list[str] = field(default_factory=list)
    """Conversations that were longer than a sequence, and were cut at its end."""

    partly: list[str] = field(default_factory=list)
    """Conversations with answers that are left out."""

    def remarks(self) -> list[str]:
        """Return a line for each kind of loss."""
        remarks = []
        if self.unusable:
            remarks.append(f"left out {pluralise(len(self.unusable), 'line')}: {_name_some(self.unusable)}")
        if self.partly:
            remarks.append(
                f"no loss on answers that the chat template changes when messages follow, in "
                f"{pluralise(len(self.partly), 'conversation')}: {_name_some(self.partly)}"
            )
        if self.cut:
            remarks.append(f"cut {pluralise(len(self.cut), 'conversation')} at seq_len: {_name_some(self.cut)}")
        return remarks


def read(path: Path, tokenizer: Tokenizer, seq_len: int) -> Corpus:
    """Return the documents of a file or of a folder.  Raises UsageError and UnreadableFile if there are none."""
    corpus = Corpus()
    for file in _list_files(path):
        for place, content in _read_samples(file):
            try:
                sample = _parse(content, is_text=file.suffix == ".txt")
                _add(corpus, _to_document(sample, tokenizer), place, seq_len)
            except _UnusableSample as reason:
                corpus.unusable.append(f"{place} ({reason})")
    if not corpus.documents:
        raise UnreadableFile(f"{path} has nothing to train on: {_name_some(corpus.unusable) or 'it has no line'}.")
    return corpus


class _UnusableSample(Exception):
    """A sample that cannot be trained on, with the reason."""


def _list_files(path: Path) -> list[Path]:
    if not path.exists():
        raise UsageError(f"The data {path} does not exist; give a .txt or .jsonl file, or a folder of them.")
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise UsageError(f"{path} is neither .txt nor .jsonl; rename it to what it holds.")
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    if not files:
        raise UsageError(f"The folder {path} has no .txt or .jsonl file.")
    return files


def _read_samples(file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the content of a text file, or each line of a file of JSON lines, with its place."""
    try:
        if file.suffix == ".txt":
            yield str(file), file.read_bytes()
            return
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                yield f"{file}:{number}", line
    except OSError as error:
        raise UnreadableFile(f"{file} cannot be read ({error.strerror or error}).") from error


def _parse(content: bytes, *, is_text: bool) -> str | list[Any]:
    """Return a sample: a text, or a list of messages.  Raises _UnusableSample."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _UnusableSample("no UTF-8") from error
    if not text.strip():
        raise _UnusableSample("empty")
    if is_text:
        return text
    try:
        sample = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _UnusableSample("no JSON") from error
    if not isinstance(sample, dict) or not {"text", "messages"} & sample.keys():
        raise _UnusableSample("no field text or messages")
    if "\\u" in text and _HALF.search(json.dumps(sample, ensure_ascii=False)):
        raise _UnusableSample("half of a character")
    if "messages" in sample:
        _check_messages(sample["messages"])
        return list(sample["messages"])
    if not isinstance(sample["text"], str) or not sample["text"].strip():
        raise _UnusableSample("text is empty or no text")
    return sample["text"]


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list) or not messages:
        raise _UnusableSample("messages is no list, or empty")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _UnusableSample("a message without role")
        if not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):
            raise _UnusableSample("a message without content")
    if not any(message["role"] == ASSISTANT for message in messages):
        raise _UnusableSample(f"no message of the role {ASSISTANT}")


def _to_document(sample: str | list[Any], tokenizer: Tokenizer) -> Document:
    """Return the tokens of a sample, with labels for the answers alone in a conversation."""
    if isinstance(sample, str):
        ids = torch.tensor(tokenizer.encode(sample), dtype=torch.int32)
        return Document(ids=ids, labels=ids, is_whole=False)
    try:
        numbers, is_answer, left_out = tokenizer.encode_messages(sample)
    except ValueError as error:  # of the template or of the tokenizer
        raise _UnusableSample(" ".join(str(error).split())) from error
    ids = torch.tensor(numbers, dtype=torch.int32)
    labels = ids.masked_fill(~torch.tensor(is_answer, dtype=torch.bool), IGNORED_LABEL)
    return Document(ids=ids, labels=labels, is_whole=True, answers_left_out=left_out)


def _add(corpus: Corpus, document: Document, place: str, seq_len: int) -> None:
    """Add a document to the corpus; a conversation is cut at the length of a sequence."""
    length = len(document.ids)
    is_cut = document.is_whole and length > seq_len
    if is_cut:
        document = replace(document, ids=document.ids[:seq_len], labels=document.labels[:seq_len])
    if not bool((document.labels[1:] != IGNORED_LABEL).any()):
        where = f" in the first {seq_len:,} of {length:,}" if is_cut else ""
        raise _UnusableSample(f"no token that the loss could predict{where}")
    if document.answers_left_out:
        corpus.partly.append(f"{place} ({pluralise(document.answers_left_out, 'answer')})")
    if is_cut:
        corpus.cut.append(f"{place} ({length:,} tokens)")
    corpus.documents.append(document)


def _name_some(places: Sequence[str]) -> str:
    """Return the first places, and the number of the others."""
    named = ", ".join(places[:_NAMED])
    return named if len(places) <= _NAMED else f"{named} and {len(places) - _NAMED:,} more"
