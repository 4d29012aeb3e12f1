"""Tokens of text: by a tokenizer's folder, or bytes where a network has no tokenizer.

A tokenizer needs no padding token: sequences are packed or cut to one length.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from tonnage.errors import UnreadableFile, UsageError

_FILES: Final = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
"""Files of which a folder with a tokenizer has at least one."""

_BYTES: Final = 256
"""Vocabulary that bytes need."""


class Tokenizer(Protocol):
    """The interface of tokenizers that the data uses."""

    description: str
    """A description for the user."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a document, with its end."""

    def encode_messages(self, messages: Sequence[Any]) -> tuple[list[int], list[bool], int]:
        """Return the token ids of a conversation, for each whether it is learned, and the answers that are not.

        What the assistant says is learned, where it is the same as when it was the last message.  Raises ValueError.
        """

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files into a folder."""


class Bytes:
    """Bytes of UTF-8 as tokens; a document ends with a zero."""

    description = "bytes as tokens"

    def encode(self, text: str) -> list[int]:
        return [*text.encode("utf-8"), 0]

    def encode_messages(self, messages: Sequence[Any]) -> tuple[list[int], list[bool], int]:
        raise UsageError(
            "The data has messages, and bytes as tokens have no chat template; give a tokenizer with --tokenizer."
        )

    def save(self, folder: Path) -> None:
        """Write nothing: bytes have no file."""


class FolderTokenizer:
    """A tokenizer of transformers."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # libraries of several packages read the files
            reason = " ".join(str(error).split())[:200]
            raise UnreadableFile(f"The tokenizer in {folder} cannot be read ({reason}).") from error
        self.description = f"the tokenizer of {folder} ({len(self._tokenizer):,} tokens)"

    @property
    def largest(self) -> int:
        """Return the largest token id."""
        return max(map(int, self._tokenizer.get_vocab().values()))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, verbose=False)["input_ids"]
        end = self._tokenizer.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]

    def encode_messages(self, messages: Sequence[Any]) -> tuple[list[int], list[bool], int]:
        if self._tokenizer.chat_template is None:
            raise UsageError(
                f"The data has messages, and {self.description} has no chat template; give another with --tokenizer."
            )
        text = self._render(messages)
        spans, left_out = self._find_answers(messages, text)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts = [start for start, _ in encoded["offset_mapping"]]
        is_answer = [any(begin <= start < end for begin, end in spans) for start in starts]
        return encoded["input_ids"], is_answer, left_out

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)

    def _render(self, messages: Sequence[Any], *, asks: bool = False) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=asks)
            )
        except Exception as error:  # templates raise errors of Jinja, and of their own
            raise ValueError(f"the chat template refuses it: {error}") from error

    def _find_answers(self, messages: Sequence[Any], text: str) -> tuple[list[tuple[int, int]], int]:
        """Return where the answers begin and end in the rendered text, and the number of those that are left out.

        An answer begins where the template asks for it, so that the network learns what it will be asked for, and
        ends with its message.  Templates that drop the reasoning of earlier answers change what the network had
        said: such an answer is left out.
        """
        spans = []
        numbers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        for index in numbers:
            before = self._render(messages[:index], asks=True)
            until = self._render(messages[: index + 1])
            if text.startswith(before) and text.startswith(until):
                spans.append((len(before), len(until)))
        if not spans:
            raise ValueError("the chat template changes earlier messages, so that answers cannot be told apart")
        return spans, len(numbers) - len(spans)


def load(stated: Path | None, home: Path, vocabulary: int) -> Tokenizer:
    """Return the tokenizer of the folder that the user stated, else of the model's `home`, or bytes if that has none.

    Raises UsageError if the network's vocabulary is too small for it.
    """
    folder = stated or home
    if not any((folder / name).is_file() for name in _FILES):
        if stated is not None:
            raise UsageError(f"--tokenizer {stated} has no tokenizer; it has one of {', '.join(_FILES)}.")
        if vocabulary < _BYTES:
            raise UsageError(
                f"The model has no tokenizer, and its {vocabulary} tokens are too few for bytes ({_BYTES}); give "
                "--tokenizer DIR."
            )
        return Bytes()
    tokenizer = FolderTokenizer(folder)
    if tokenizer.largest >= vocabulary:
        raise UsageError(
            f"{tokenizer.description} has token ids up to {tokenizer.largest:,}, and the model's vocabulary has "
            f"{vocabulary:,}; give the model's own with --tokenizer."
        )
    return tokenizer
