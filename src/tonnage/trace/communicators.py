"""The NCCL communicators that a rank has used, and its direct peers in them: NCCL keeps buffers for each."""

from collections.abc import Iterator
from typing import NamedTuple

Layout = tuple[int, int, int]
"""Size of a communicator in ranks, its number, and the index of this rank in it."""


class First(NamedTuple):
    """The communicator and the direct peers that an exchange is the first to use."""

    ranks: int = 0
    """Size of the new communicator in ranks; 0: it was used before."""
    peers: int = 0
    """Number of new direct peers."""


class Communicators:
    """Records the communicators and direct peers of a rank's exchanges.

    Exchanges with direct peers are messages (pipelines) and all-to-all.  In a group of two ranks NCCL has no buffers
    besides those of the communicator.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._peers: set[tuple[int, int]] = set()

    def use(self, layout: Layout, name: str, peer: int) -> First:
        """Record an exchange, and return the communicator and peers that are new with it."""
        ranks, number, _ = layout
        is_new = number not in self._sizes
        self._sizes[number] = ranks
        before = len(self._peers)
        self._peers.update((number, other) for other in _direct_peers(layout, name, peer))
        return First(ranks if is_new else 0, len(self._peers) - before)

    @property
    def sizes(self) -> list[int]:
        """Return the size in ranks of each used communicator, ascending."""
        return sorted(self._sizes.values())

    @property
    def peers(self) -> int:
        """Return the number of direct peers; a rank that is one in two communicators counts twice."""
        return len(self._peers)


def _direct_peers(layout: Layout, name: str, peer: int) -> Iterator[int]:
    ranks, _, mine = layout
    if ranks > 2 and name in ("Send", "Recv", "AllToAll"):
        yield from (other for other in (range(ranks) if name == "AllToAll" else (peer,)) if other != mine)
