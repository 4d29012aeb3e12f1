"""What one layer may keep between forward and backward: the fewest seconds of running again for any number of bytes.

A layer is a list of pieces: an operation and the memory that it makes.  Backward needs some of them.  What is needed
and was not kept runs again, and what that reads is needed in turn, down to pieces that were kept and to what the
layer was given.  So a kept piece spares everything that only it would have called for, and which ones to keep is no
knapsack of independent items: two pieces behind each other are worth less together than alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

MOST_LABELS: Final = 2000
"""Ways to come as far as a piece that are followed at once.  Beyond, those with the closest neighbours are given up,
and the frontier is no longer proven to be the best."""


@dataclass(frozen=True, slots=True)
class Piece:
    """An operation of a layer, and the memory of its results."""

    bytes: int
    """Of its results."""
    seconds: float
    """To run it again."""
    reads: tuple[int, ...] = ()
    """The pieces whose memory it reads."""
    saved: bool = False
    """Whether backward needs it."""
    wanted: bool = False
    """Whether it has to be there when the layer runs again, whoever reads it."""
    fixed: bool = False
    """Whether it runs again in any case: it draws random numbers, or was changed in place."""
    lingers: bool = False
    """Whether the program still refers to it when the last piece that backward needs is there again."""


@dataclass(frozen=True, slots=True)
class Point:
    """One way to run a layer again."""

    bytes: int
    """Kept, without what the layer was given."""
    seconds: float
    """Of running again."""
    kept: frozenset[int]
    """The pieces."""


Label: TypeAlias = tuple[int, float, int]
"""Bytes, seconds and pieces kept (a bit each) of what was decided so far."""


def frontier(pieces: Sequence[Piece]) -> tuple[Point, ...]:
    """All ways to run a layer again that no other beats in both bytes and seconds, from the fewest bytes on.

    Pieces are decided from the last to the first.  What the rest has to know of those decided is only which of its
    pieces they read (a mask), so of all ways to the same mask those that are beaten are forgotten.
    """
    always = wanted(pieces)
    reads = [_mask(piece.reads) & ~_mask(always) for piece in pieces]
    states: dict[int, list[Label]] = {0: [(0, 0.0, 0)]}
    for index in reversed(range(len(pieces))):
        states = _decided(states, index, pieces[index], index in always, reads[index])
    (labels,) = states.values()
    return tuple(Point(kept_bytes, seconds, _pieces(kept)) for kept_bytes, seconds, kept in labels)


def wanted(pieces: Sequence[Piece]) -> frozenset[int]:
    """Pieces that are kept or run again in any case: those that backward needs or that fixed ones read."""
    found = {index for index, piece in enumerate(pieces) if piece.saved or piece.wanted or piece.fixed}
    return frozenset(found | {read for piece in pieces if piece.fixed for read in piece.reads})


def run_again(pieces: Sequence[Piece], kept: frozenset[int]) -> frozenset[int]:
    """The pieces that run again when these are kept."""
    open_, found = [index for index in wanted(pieces) if index not in kept], set[int]()
    while open_:
        index = open_.pop()
        if index not in found:
            found.add(index)
            open_ += [read for read in pieces[index].reads if read not in kept]
    return frozenset(found)


def held_again(pieces: Sequence[Piece], kept: frozenset[int]) -> int:
    """Most bytes held while the layer runs again: what is saved or lingers, and what was kept besides."""
    return sum(piece.bytes for index, piece in enumerate(pieces) if piece.saved or piece.lingers or index in kept)


def _decided(
    states: dict[int, list[Label]], index: int, piece: Piece, always: bool, reads: int
) -> dict[int, list[Label]]:
    """The labels by mask, with one more piece kept, run again or left out."""
    bit = 1 << index
    found: dict[int, list[Label]] = {}
    for mask, labels in states.items():
        if not always and not mask & bit:
            found.setdefault(mask, []).extend(labels)
            continue
        again = found.setdefault((mask & ~bit) | reads, [])
        again.extend((held, seconds + piece.seconds, kept) for held, seconds, kept in labels)
        if not piece.fixed:
            keeping = found.setdefault(mask & ~bit, [])
            keeping.extend((held + piece.bytes, seconds, kept | bit) for held, seconds, kept in labels)
    return {mask: _few(_unbeaten(labels)) for mask, labels in found.items()}


def _unbeaten(labels: list[Label]) -> list[Label]:
    """Without those that another label needs neither more bytes nor more seconds than."""
    found: list[Label] = []
    for label in sorted(labels):
        if not found or label[1] < found[-1][1]:
            found.append(label)
    return found


def _few(labels: list[Label]) -> list[Label]:
    """At most MOST_LABELS of them, evenly over their order, the ends included."""
    if len(labels) <= MOST_LABELS:
        return labels
    last = len(labels) - 1
    return [labels[place * last // (MOST_LABELS - 1)] for place in range(MOST_LABELS)]


def _mask(indices: Iterable[int]) -> int:
    found = 0
    for index in indices:
        found |= 1 << index
    return found


def _pieces(mask: int) -> frozenset[int]:
    return frozenset(index for index in range(mask.bit_length()) if mask >> index & 1)
