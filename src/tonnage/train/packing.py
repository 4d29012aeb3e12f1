"""Sequences of one length, made of documents, and the order in which a run reads them.

Without packing, texts are joined and cut: a sequence may hold the end of one text and the beginning of the next.
With it (`packing` in the plan) no document sees another: positions restart at each, from which transformers makes a
block-diagonal mask.  A conversation is never split; what follows it in its sequence is padding that has no label.

The order of an epoch is a function of the seed and its number alone, and a run reads the epochs as one stream: a step
takes the next sequences of it, whichever epoch they are of.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch

from tonnage.job import IGNORED_LABEL
from tonnage.train.data import Document

Batch = dict[str, torch.Tensor]
Piece = tuple[torch.Tensor, torch.Tensor]
"""Token ids and labels of a part of a sequence."""

_HELD_OUT: Final = -1
"""Number of the order in which sequences are held out for evaluation, as if it was an epoch's."""


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Sequences of one length."""

    ids: torch.Tensor
    """Token ids, a row each."""
    labels: torch.Tensor
    """Labels, a row each."""
    positions: torch.Tensor | None
    """Positions, which restart at each document; None: sequences are not packed."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def digest(self) -> str:
        """Return a text that differs for other data."""
        digest = hashlib.sha256()
        for tensor in (self.ids, self.labels, self.positions):
            if tensor is not None:
                digest.update(tensor.contiguous().numpy())
        return digest.hexdigest()[:16]

    def select(self, rows: torch.Tensor) -> Sequences:
        """Return some of the sequences."""
        positions = None if self.positions is None else self.positions[rows]
        return Sequences(ids=self.ids[rows], labels=self.labels[rows], positions=positions)

    def batch(self, rows: Sequence[int], size: int) -> Batch:
        """Return a micro-batch of `size` sequences; where there are fewer rows, the others have no label."""
        chosen = self.select(torch.tensor(rows, dtype=torch.long))
        missing = size - len(rows)
        batch = {
            "input_ids": torch.nn.functional.pad(chosen.ids.long(), (0, 0, 0, missing)),
            "labels": torch.nn.functional.pad(chosen.labels.long(), (0, 0, 0, missing), value=IGNORED_LABEL),
        }
        if chosen.positions is not None:
            empty = torch.arange(self.ids.shape[1]).expand(missing, -1)
            batch["position_ids"] = torch.cat([chosen.positions.long(), empty])
        return batch


def make(documents: Sequence[Document], seq_len: int, *, packs: bool) -> Sequences:
    """Return the documents as sequences of `seq_len` tokens."""
    pieces = _cut_each(documents, seq_len) if packs else _cut_joined(documents, seq_len)
    groups = _fill(pieces, seq_len) if packs else [[piece] for piece in pieces]
    ids = torch.zeros(len(groups), seq_len, dtype=torch.int32)
    labels = torch.full((len(groups), seq_len), IGNORED_LABEL, dtype=torch.int32)
    positions = torch.zeros(len(groups), seq_len, dtype=torch.int32)
    for row, group in enumerate(groups):
        begin = 0
        for tokens, wanted in group:
            end = begin + len(tokens)
            ids[row, begin:end], labels[row, begin:end] = tokens, wanted
            positions[row, begin:end] = torch.arange(len(tokens))
            if packs:
                labels[row, begin] = IGNORED_LABEL  # the token before it is another document's
            begin = end
        positions[row, begin:] = torch.arange(seq_len - begin)
    return Sequences(ids=ids, labels=labels, positions=positions if packs else None)


def hold_out(sequences: Sequences, share: float, seed: int) -> tuple[Sequences, Sequences]:
    """Return the sequences to train on, at least one, and a share of at least one to evaluate on."""
    held = min(max(1, round(len(sequences) * share)), len(sequences) - 1)
    order = shuffle(len(sequences), seed, _HELD_OUT)
    return sequences.select(order[held:].sort().values), sequences.select(order[:held].sort().values)


@lru_cache(maxsize=2)
def shuffle(count: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the order of an epoch."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(mix(seed, epoch)))


def mix(*numbers: int) -> int:
    """Return a seed that is a function of all the numbers."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:7], "big")


def rows_of_step(begin: int, end: int, count: int, seed: int) -> list[int]:
    """Return the rows from `begin` to `end` of the stream of all epochs of `count` rows."""
    return [int(shuffle(count, seed, place // count)[place % count]) for place in range(begin, end)]


def share_rows(rows: Sequence[int], *, size: int, micro_batches: int, ranks: int, rank: int) -> list[Sequence[int]]:
    """Return a rank's rows of each of its micro-batches, of which the ranks take `size` rows in turn."""
    begins = ((index * ranks + rank) * size for index in range(micro_batches))
    return [rows[begin : begin + size] for begin in begins]


def _cut_joined(documents: Sequence[Document], seq_len: int) -> list[Piece]:
    """Return pieces of joined texts, each of full length but the last one, and each conversation."""
    texts = [document for document in documents if not document.is_whole]
    whole = [(document.ids, document.labels) for document in documents if document.is_whole]
    if not texts:
        return whole
    joined = torch.cat([document.ids for document in texts])
    return [*((part, part) for part in joined.split(seq_len)), *whole]


def _cut_each(documents: Sequence[Document], seq_len: int) -> list[Piece]:
    """Return pieces of single documents, of full length but the last one of each."""
    return [
        piece
        for document in documents
        for piece in zip(document.ids.split(seq_len), document.labels.split(seq_len), strict=True)
        if len(piece[0]) > 1
    ]


def _fill(pieces: Sequence[Piece], seq_len: int) -> list[list[Piece]]:
    """Return groups of pieces that fit into a sequence: the longest first, each where the least room is left."""
    groups: list[list[Piece]] = []
    rooms: list[tuple[int, int]] = []  # tokens that are free in a group, and the group, in order
    for piece in sorted(pieces, key=lambda piece: -len(piece[0])):
        length = len(piece[0])
        place = bisect.bisect_left(rooms, (length, -1))
        free, group = rooms.pop(place) if place < len(rooms) else (seq_len, len(groups))
        if group == len(groups):
            groups.append([])
        groups[group].append(piece)
        if free > length:
            bisect.insort(rooms, (free - length, group))
    return groups
