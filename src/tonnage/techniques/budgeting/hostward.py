"""Results that a layer keeps on the host: copied away behind the next layer's forward, back before its own backward.

Copies run on a stream of their own.  A layer's results stay on the card until the forward of the next such layer is
over, and come back while the backward of the next one runs: at most those of two layers are on the card at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import ref

import torch

from tonnage.techniques.copies import Copies

SMALL_BYTES: Final = 1 << 20
"""Results below it are not worth a copy."""


@dataclass(eq=False)
class Sent:
    """One result on its way."""

    host: torch.Tensor
    card: torch.Tensor | None
    """Until it is let go, and again from when it comes back."""
    done: Any
    """The event of the latest copy; None where there are no streams."""


@dataclass(eq=False)
class Luggage:
    """The results of one layer's forward."""

    host: Host
    previous: Callable[[], Luggage | None]
    """That of the layer before it, if it is still there."""
    pieces: list[Sent] = field(default_factory=list)

    def send(self, tensor: torch.Tensor) -> Sent:
        """Begin the copy of a result to the host."""
        tensor = detached(tensor)
        there = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=self.host.copies.stream is not None
        )
        self.pieces.append(Sent(there, tensor, self.host.copies.begin(there, tensor)))
        return self.pieces[-1]

    def let_go(self) -> None:
        """The card keeps nothing any more, once the copies are done."""
        for piece in self.pieces:
            self.host.copies.wait(piece.done)
            piece.card = None

    def bring(self) -> None:
        """Begin to copy back what is not on the card."""
        for piece in self.pieces:
            if piece.card is None:
                piece.card = torch.empty_strided(
                    piece.host.shape, piece.host.stride(), dtype=piece.host.dtype, device=self.host.device
                )
                piece.done = self.host.copies.begin(piece.card, piece.host)

    def take(self, piece: Sent) -> torch.Tensor:
        """A result that is back."""
        self.host.copies.wait(piece.done)
        assert piece.card is not None, "the layer runs again, so its results were brought"
        tensor, piece.card = piece.card, None
        self.pieces.remove(piece)
        return tensor


class Host:
    """Where the layers of a network send results, in the order in which they run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copies = Copies(device)
        self._last: Callable[[], Luggage | None] = _nothing

    def luggage(self) -> Luggage:
        """For a layer that begins."""
        found = Luggage(self, self._last)
        self._last = ref(found)
        return found


def _nothing() -> None:
    return None


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory and version without the graph, which would refer to itself through what it keeps."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def fitting(sizes: Sequence[int], room_bytes: int) -> frozenset[int]:
    """Which of some sizes to send: the most bytes in all within the room, up to 1 MiB each, without small ones."""
    reached: dict[int, int] = {0: 0}
    for index, size in enumerate(sizes):
        if size < SMALL_BYTES:
            continue
        step = -(-size // SMALL_BYTES)
        further = {total + step: chosen | 1 << index for total, chosen in reached.items()}
        reached = {t: c for t, c in {**further, **reached}.items() if t * SMALL_BYTES <= room_bytes}
    chosen = reached[max(reached)]
    return frozenset(index for index in range(len(sizes)) if chosen >> index & 1)
