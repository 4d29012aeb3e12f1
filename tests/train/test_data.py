"""Conversations as tokens: the loss uses what the assistant says, as the model's own chat template writes it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tonnage.errors import UnreadableFile
from tonnage.job import IGNORED_LABEL
from tonnage.train import data, packing
from tonnage.train.tokens import FolderTokenizer

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
REASONING = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Shows reasoning in the last message alone, as the template of Qwen3 does."""

CHANGING = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
TALK = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": " f\u00fcr you "},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "two"},
]


def tokenizer(folder: Path, template: str) -> FolderTokenizer:
    """Return one of bytes and two special tokens, with a chat template and without a padding token."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(symbols)}, merges=[]))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=bytes_alone, eos_token="<end>")
    made.chat_template = template
    made.save_pretrained(folder)
    return FolderTokenizer(folder)


def read(folder: Path, template: str, *talks: Any, seq_len: int = 256) -> tuple[data.Corpus, list[str]]:
    """Return the corpus of some conversations, and the text that the loss uses of each."""
    words = tokenizer(folder, template)
    (folder / "talks.jsonl").write_text("\n".join(json.dumps({"messages": talk}) for talk in talks))
    corpus = data.read(folder / "talks.jsonl", words, seq_len)
    learned = [document.labels[document.labels != IGNORED_LABEL].tolist() for document in corpus.documents]
    return corpus, [words._tokenizer.decode(ids) for ids in learned]


def test_the_loss_uses_answers_with_their_ends(tmp_path: Path) -> None:
    corpus, learned = read(tmp_path, PLAIN, TALK, TALK[:2], TALK[:3])
    assert learned == ["f\u00fcr you<end>two<end>", "f\u00fcr you<end>", "f\u00fcr you<end>"]
    assert corpus.remarks() == []
    ids, labels = corpus.documents[0].ids, corpus.documents[0].labels
    assert torch.equal(labels[labels != IGNORED_LABEL], ids[labels != IGNORED_LABEL])
    [row] = packing.make(corpus.documents[1:2], 256, packs=False).labels
    assert int((row != IGNORED_LABEL).sum()) == int((corpus.documents[1].labels != IGNORED_LABEL).sum())


def test_an_answer_that_is_changed_when_more_follows_is_left_out(tmp_path: Path) -> None:
    corpus, learned = read(tmp_path, REASONING, TALK, TALK[:2])
    assert learned == ["<think></think>two<end>", "<think></think> f\u00fcr you <end>"]
    [remark] = corpus.remarks()
    assert "no loss on answers that the chat template changes when messages follow, in 1 conversation" in remark
    assert "talks.jsonl:1 (1 answer)" in remark


def test_a_template_that_changes_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFile, match="the chat template changes earlier messages"):
        read(tmp_path, CHANGING, TALK)


def test_a_conversation_that_is_too_long_is_cut_and_named(tmp_path: Path) -> None:
    corpus, learned = read(tmp_path, PLAIN, TALK, [{"role": "user", "content": "x" * 90}, TALK[1]], seq_len=36)
    assert learned == ["f\u00fcr you<end>"]
    left_out, cut = corpus.remarks()
    assert "no token that the loss could predict in the first 36 of" in left_out
    assert "cut 1 conversation at seq_len: " in cut
