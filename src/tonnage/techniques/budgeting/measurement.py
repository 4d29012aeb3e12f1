"""One run of a layer, measured: its operations, and the bytes that it saves for backward or holds while it runs
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tonnage.techniques.budgeting.recording import Layer


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A layer's operations, and the bytes that it gets, saves and holds."""

    layer: Layer
    """Its operations and the memory that they make."""
    given: int
    """Bytes of its input."""
    saved: int
    """Bytes that autograd saves if the layer is not checkpointed."""
    again: int
    """Most bytes held while the layer runs again: its input, all that autograd saves, and what its code still
    refers to.
    """


def measure(layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Measured:
    """Run a layer once and free everything: what is freed with its graph is what autograd would have saved.

    Hooks that collect outputs for the network, such as the logits of routers, do not see this run.
    """
    from torch.autograd.graph import saved_tensors_hooks

    from tonnage.step import random_states
    from tonnage.techniques.budgeting import prices, recording

    given = tensors_in((args, kwargs))
    device = given[0].device
    saved = Storages()
    watched = recording.Recording([*layer.parameters(), *layer.buffers(), *given], device, prices.on(device))

    def keep(tensor: Tensor) -> None:
        saved.add(tensor)
        watched.save(tensor)

    with (
        random_states.kept(device),
        saved_tensors_hooks(keep, lambda nothing: nothing),
        _without_cast_cache(),
        watched.mode(),
    ):
        Context().run(forward, *args, **kwargs)  # transformers' collector is a context variable
    input_storages = Storages(given[0])
    inputs = sum(input_storages.sizes.values())
    recorded = watched.layer()
    lingering = sum(piece.bytes for piece in recorded.pieces if piece.lingers and not piece.saved)
    return Measured(
        layer=recorded,
        given=inputs,
        saved=saved.gone_bytes() + saved.shared_bytes(input_storages),
        again=inputs + saved.gone_bytes() + lingering,
    )


@contextmanager
def _without_cast_cache() -> Iterator[None]:
    """Make autocast cast weights again, as if a layer ran for the first time or again."""
    import torch

    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class Storages:
    """The storages of tensors, each once, without keeping them alive."""

    def __init__(self, *tensors: Tensor) -> None:
        self.sizes: dict[int, int] = {}
        self.references: dict[int, Any] = {}
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        """Add the storages of a tensor."""
        from torch.multiprocessing.reductions import StorageWeakRef

        from tonnage.techniques.budgeting import recording

        for part in recording.plain(tensor):
            storage = part.untyped_storage()
            key = storage._cdata  # the reference keeps this number from being reused for another storage
            self.references[key] = StorageWeakRef(storage)
            self.sizes[key] = recording.blocks(storage.nbytes())

    def gone_bytes(self, but_for: Storages | None = None) -> int:
        """Return the bytes of storages that are not alive any more, except those in `but_for`."""
        left_out = but_for.sizes if but_for is not None else {}
        return sum(
            size_bytes
            for key, size_bytes in self.sizes.items()
            if key not in left_out and self.references[key].expired()
        )

    def shared_bytes(self, other: Storages) -> int:
        """Return the bytes of storages that are in `other` too."""
        return sum(size_bytes for key, size_bytes in self.sizes.items() if key in other.sizes)


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors among nested values."""
    import torch
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
