"""NCCL's communicators that a rank has used, and the peers it met in them: whatever it has buffers for."""

from collections.abc import Iterator
from typing import NamedTuple

Layout = tuple[int, int, int]
"""Ranks of a communicator, its number, and the place of this rank in it."""


class First(NamedTuple):
    """What an exchange is the first one of."""

    ranks: int = 0
    """In a communicator of so many ranks; 0: in one that was used before."""
    peers: int = 0
    """With so many ranks, directly."""


class Communicators:
    """Goes along with a rank's exchanges.

    Directly with another are messages (pipelines) and all-to-all.  Groups of two have nothing besides their
    communicator.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._met: set[tuple[int, int]] = set()

    def use(self, layout: Layout, name: str, peer: int) -> First:
        """What is new with an exchange of this name."""
        ranks, number, _ = layout
        new = number not in self._sizes
        self._sizes[number] = ranks
        before = len(self._met)
        self._met.update((number, other) for other in _directly(layout, name, peer))
        return First(ranks if new else 0, len(self._met) - before)

    @property
    def sizes(self) -> list[int]:
        """Ranks of each communicator that was used, ascending."""
        return sorted(self._sizes.values())

    @property
    def peers(self) -> int:
        """How many others were exchanged with directly; in two communicators counted twice."""
        return len(self._met)


def _directly(layout: Layout, name: str, peer: int) -> Iterator[int]:
    ranks, _, mine = layout
    if ranks > 2 and name in ("Send", "Recv", "AllToAll"):
        yield from (other for other in (range(ranks) if name == "AllToAll" else (peer,)) if other != mine)
