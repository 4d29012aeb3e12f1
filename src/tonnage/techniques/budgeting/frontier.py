"""The Pareto frontier of one layer: the fewest seconds of running again for any number of kept bytes.

A layer is a list of pieces: an operation and the memory that it makes.  Backward needs some of them.  What is needed
and was not kept runs again, and what that reads is needed in turn, down to pieces that were kept and to the layer's
input.  So a kept piece spares everything that only it needs, and the choice of pieces is no knapsack of independent
items: two pieces in a row are worth less together than the sum of each alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

MOST_LABELS: Final = 2000
"""Partial choices that are followed at once for a piece.  Beyond that number the ones with the closest neighbours
are dropped, and the frontier is no longer proven to be optimal.
"""


@dataclass(frozen=True, slots=True)
class Piece:
    """An operation of a layer, and the memory of its results."""

    bytes: int
    """Bytes of its results."""
    seconds: float
    """Seconds to run it again."""
    reads: tuple[int, ...] = ()
    """The pieces whose memory it reads."""
    saved: bool = False
    """True if backward needs it."""
    wanted: bool = False
    """True if it must exist when the layer runs again, whatever reads it."""
    fixed: bool = False
    """True if it runs again in any case: it draws random numbers, or was changed in place."""
    lingers: bool = False
    """True if the program still refers to it when the last piece that backward needs exists again."""


@dataclass(frozen=True, slots=True)
class Point:
    """One choice of kept pieces."""

    bytes: int
    """Bytes kept, without the layer's input."""
    seconds: float
    """Seconds of running again."""
    kept: frozenset[int]
    """The pieces that are kept."""


Label: TypeAlias = tuple[int, float, int]
"""Bytes, seconds and kept pieces (a bit each) of a partial choice."""


def frontier(pieces: Sequence[Piece]) -> tuple[Point, ...]:
    """Return all Pareto-optimal choices of a layer in bytes and seconds, from the fewest bytes on.

    Pieces are decided from the last to the first.  The rest only needs to know which of its pieces the decided ones
    read (a mask), so of all partial choices with the same mask the dominated ones are dropped.
    """
    always = wanted(pieces)
    reads = [_mask(piece.reads) & ~_mask(always) for piece in pieces]
    states: dict[int, list[Label]] = {0: [(0, 0.0, 0)]}
    for index in reversed(range(len(pieces))):
        states = _decide_piece(states, index, pieces[index], index in always, reads[index])
    (labels,) = states.values()
    return tuple(Point(kept_bytes, seconds, _pieces(kept)) for kept_bytes, seconds, kept in labels)


def wanted(pieces: Sequence[Piece]) -> frozenset[int]:
    """Return the pieces that are kept or run again in any case: those that backward needs or that fixed ones read."""
    needed = {index for index, piece in enumerate(pieces) if piece.saved or piece.wanted or piece.fixed}
    return frozenset(needed | {read for piece in pieces if piece.fixed for read in piece.reads})


def run_again(pieces: Sequence[Piece], kept: frozenset[int]) -> frozenset[int]:
    """Return the pieces that run again if these are kept."""
    pending, again = [index for index in wanted(pieces) if index not in kept], set[int]()
    while pending:
        index = pending.pop()
        if index not in again:
            again.add(index)
            pending += [read for read in pieces[index].reads if read not in kept]
    return frozenset(again)


def held_again(pieces: Sequence[Piece], kept: frozenset[int]) -> int:
    """Return the most bytes held while the layer runs again: what is saved or lingers, and what was kept besides."""
    return sum(piece.bytes for index, piece in enumerate(pieces) if piece.saved or piece.lingers or index in kept)


def _decide_piece(
    states: dict[int, list[Label]], index: int, piece: Piece, always: bool, reads: int
) -> dict[int, list[Label]]:
    """Return the labels by mask, with one more piece kept, run again or left out."""
    bit = 1 << index
    decided: dict[int, list[Label]] = {}
    for mask, labels in states.items():
        if not always and not mask & bit:
            decided.setdefault(mask, []).extend(labels)
            continue
        running = decided.setdefault((mask & ~bit) | reads, [])
        running.extend((held, seconds + piece.seconds, kept) for held, seconds, kept in labels)
        if not piece.fixed:
            keeping = decided.setdefault(mask & ~bit, [])
            keeping.extend((held + piece.bytes, seconds, kept | bit) for held, seconds, kept in labels)
    return {mask: _thin_out(_drop_dominated(labels)) for mask, labels in decided.items()}


def _drop_dominated(labels: list[Label]) -> list[Label]:
    """Return the labels that no other label beats in both bytes and seconds."""
    optimal: list[Label] = []
    for label in sorted(labels):
        if not optimal or label[1] < optimal[-1][1]:
            optimal.append(label)
    return optimal


def _thin_out(labels: list[Label]) -> list[Label]:
    """Return at most MOST_LABELS of them, evenly over their order, the ends included."""
    if len(labels) <= MOST_LABELS:
        return labels
    last = len(labels) - 1
    return [labels[number * last // (MOST_LABELS - 1)] for number in range(MOST_LABELS)]


def _mask(indices: Iterable[int]) -> int:
    mask = 0
    for index in indices:
        mask |= 1 << index
    return mask


def _pieces(mask: int) -> frozenset[int]:
    return frozenset(index for index in range(mask.bit_length()) if mask >> index & 1)
