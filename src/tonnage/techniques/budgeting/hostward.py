"""Results that a layer keeps on the host: copied there during the next layer's forward, and back before its own
backward.

Copies run on a stream of their own.  A layer's results stay on the GPU until the forward of the next such layer is
over, and come back while the backward of the next one runs: at most those of two layers are on the GPU at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import ref

import torch

from tonnage.techniques.copies import Copies

SMALL_BYTES: Final = 1 << 20
"""Results below this size are not worth a copy."""


@dataclass(eq=False)
class SentResult:
    """One result that is sent to the host."""

    host: torch.Tensor
    card: torch.Tensor | None
    """The result on the GPU, until it is freed there and again from when it comes back."""
    done: Any
    """The event of the latest copy; None without streams."""


@dataclass(eq=False)
class LayerResults:
    """The results of one layer's forward."""

    host: Host
    previous: Callable[[], LayerResults | None]
    """Returns those of the layer before it, if they still exist."""
    pieces: list[SentResult] = field(default_factory=list)

    def send(self, tensor: torch.Tensor) -> SentResult:
        """Start the copy of a result to the host."""
        tensor = detached(tensor)
        host_copy = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=self.host.copies.stream is not None
        )
        self.pieces.append(SentResult(host_copy, tensor, self.host.copies.begin(host_copy, tensor)))
        return self.pieces[-1]

    def free_on_card(self) -> None:
        """Free the results on the GPU as soon as the copies are done."""
        for piece in self.pieces:
            self.host.copies.wait(piece.done)
            piece.card = None

    def fetch(self) -> None:
        """Start to copy back what is not on the GPU."""
        for piece in self.pieces:
            if piece.card is None:
                piece.card = torch.empty_strided(
                    piece.host.shape, piece.host.stride(), dtype=piece.host.dtype, device=self.host.device
                )
                piece.done = self.host.copies.begin(piece.card, piece.host)

    def take(self, piece: SentResult) -> torch.Tensor:
        """Return a result that is back on the GPU."""
        self.host.copies.wait(piece.done)
        assert piece.card is not None, "the layer runs again, so its results were fetched"
        tensor, piece.card = piece.card, None
        self.pieces.remove(piece)
        return tensor


class Host:
    """Host memory to which the layers of a network send results, in the order in which they run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copies = Copies(device)
        self._last: Callable[[], LayerResults | None] = _no_results

    def begin_layer(self) -> LayerResults:
        """Return the results, still empty, of a layer whose forward begins."""
        results = LayerResults(self, self._last)
        self._last = ref(results)
        return results


def _no_results() -> None:
    return None


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory and version without the graph, which would refer to itself through what it keeps."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def fitting(sizes: Sequence[int], room_bytes: int) -> frozenset[int]:
    """Return the indices of the sizes to send: the most bytes that fit the room, in units of 1 MiB, without small
    ones.
    """
    reached: dict[int, int] = {0: 0}
    for index, size in enumerate(sizes):
        if size < SMALL_BYTES:
            continue
        step = -(-size // SMALL_BYTES)
        further = {total + step: chosen | 1 << index for total, chosen in reached.items()}
        reached = {t: c for t, c in {**further, **reached}.items() if t * SMALL_BYTES <= room_bytes}
    chosen = reached[max(reached)]
    return frozenset(index for index in range(len(sizes)) if chosen >> index & 1)
