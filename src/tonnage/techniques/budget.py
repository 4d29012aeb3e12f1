"""Checkpointing under a budget: `budget=SIZE` bytes of activations on each rank, at any moment.

Layers are measured where they run: in the first micro-batch, whose layers are all checkpointed, the first layer of
each kind runs once more with nothing recorded but the sizes of what it would have kept.  After it the most is kept
that the budget allows (`choose`), and all further micro-batches run so.

What is counted is what the report calls activations: kept for backward by layers (with the casts of their weights
that autocast makes), by what comes before and after them, and by layers while they run again.  Casts of checkpointed
layers are gone when the forward is over, and count as workspace.  Sizes are those of whole blocks of 512 bytes; the
slack of up to 1 MiB that the caching allocator may leave behind a block is not in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tonnage.errors import CannotEstimate
from tonnage.techniques.checkpointing import layer_lists_of, saved_ops, selective_contexts
from tonnage.techniques.technique import Technique
from tonnage.units import parse_bytes, size

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tonnage.step import Step

BLOCK_BYTES: Final = 512
"""The caching allocator hands out multiples of it (kMinBlockSize in CUDACachingAllocator)."""

WAYS: Final = ("full", "selective", "none")
"""How a layer may be checkpointed, from the fewest bytes kept to the most."""


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """What one layer keeps for backward, by the way in which it is checkpointed, and what it needs to run again."""

    full: int
    """Checkpointed: its input."""
    selective: int
    """Checkpointed, with the results of matrix products and attention kept."""
    none: int
    """Not checkpointed."""
    again: int
    """Most held while the checkpointed layer runs again."""
    idle: int
    """Results that `selective` keeps though nothing in the backward needs them."""

    def kept(self, way: str) -> int:
        """Bytes from forward to backward under one of WAYS."""
        return int(getattr(self, way))


@dataclass(frozen=True, kw_only=True)
class NetworkBytes:
    """What a forward pass keeps for backward: layer by layer, and around them."""

    layers: tuple[LayerBytes, ...]
    """In the order in which they run forward."""
    before: int
    """Kept until the backward is through the layers: embeddings' inputs, masks, positions."""
    after: int
    """Kept by what runs after the layers (head and loss), gone when backward comes to them."""

    def peak(self, ways: Sequence[str]) -> int:
        """Most bytes held at any moment: at the end of the forward, or while a layer runs again."""
        held, peak = self.before, 0
        for layer, way in zip(self.layers, ways, strict=True):
            if way != "none":
                peak = max(peak, held + layer.again + (layer.idle if way == "selective" else 0))
            held += layer.kept(way)
        return max(peak, held + self.after)


def choose(network: NetworkBytes, budget_bytes: int) -> tuple[str, ...] | None:
    """The way for each layer that keeps the most within the budget; None if even the fewest bytes are too many.

    First matrix products and attention are kept (they take most of a layer's time) in as many layers as possible,
    then everything else.  The last layers come first: when they run again in backward, nothing behind them is held
    any more, so that checkpointing the last one would never lower the peak.
    """
    count = len(network.layers)
    ways = ["full"] * count
    if network.peak(ways) > budget_bytes:
        return None
    for way in WAYS[1:]:
        for index in reversed(range(count)):
            layer, before = network.layers[index], ways[index]
            if way == "selective" and layer.selective >= layer.none:
                continue
            ways[index] = way
            if network.peak(ways) > budget_bytes:
                ways[index] = before
                break
    return tuple(ways)


def apply(step: Step) -> Step:
    """Watch the first micro-batch, then checkpoint as `choose` says."""
    budget = _Budget(parse_bytes(step.plan.checkpointing.partition("=")[2]))
    return replace(step, changes=(*step.changes, budget.install), contexts=(*step.contexts, budget.micro_batch))


class _Budget:
    """The measurements of one network, and what follows from them."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.ways: tuple[str, ...] | None = None
        """Of each layer; None while the first micro-batch measures."""
        self.kinds: dict[Any, LayerBytes] = {}
        """What was measured, by what makes layers alike."""
        self.layers: dict[int, LayerBytes] = {}
        """By index, in the order in which they ran."""
        self.inputs, self.before, self.after = _Storages(), _Storages(), _Storages()
        self.last = 0

    def install(self, module: nn.Module) -> nn.Module:
        """Have every layer ask this budget how it is to run."""
        layers = [layer for found in layer_lists_of(module) for layer in found]
        self.last = len(layers) - 1
        for index, layer in enumerate(layers):
            layer.forward = partial(self.run, index, layer, layer.forward)  # type: ignore[method-assign]
        return module

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Around forward and backward of each micro-batch: in the first, note what is kept outside the layers."""
        from torch.autograd.graph import saved_tensors_hooks

        if self.ways is not None:
            yield
            return
        with saved_tensors_hooks(self._note_outside, lambda tensor: tensor):
            yield
        self._decide()

    def run(self, index: int, layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One layer's forward, as the network calls it."""
        import torch
        from torch.utils.checkpoint import checkpoint

        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if self.ways is None:
            self.layers[index] = self._measured(layer, forward, args, kwargs)
        way = "full" if self.ways is None else self.ways[index]
        if way == "none":
            return forward(*args, **kwargs)
        options = {"context_fn": selective_contexts()} if way == "selective" else {}
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, **options)

    def _measured(self, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> LayerBytes:
        given = _tensors((args, kwargs))
        self.inputs.add(given[0])
        for tensor in given[1:]:  # masks and positions: the same for many layers
            self.before.add(tensor)
        kind = (type(layer), *(_looks(tensor) for tensor in [*layer.parameters(), *given]))
        if kind not in self.kinds:
            self.kinds[kind] = _measure(layer, forward, args, kwargs)
        return self.kinds[kind]

    def _note_outside(self, tensor: Tensor) -> Tensor:
        (self.after if self.last in self.layers else self.before).add(tensor)
        return tensor

    def _decide(self) -> None:
        """After a backward, when whatever is still alive was not kept for it."""
        order = sorted(self.layers)
        network = NetworkBytes(
            layers=tuple(self.layers.values()),
            before=self.before.gone_bytes(self.inputs),
            after=self.after.gone_bytes(self.inputs),
        )
        chosen = choose(network, self.budget_bytes)
        if chosen is None:
            least = network.peak(["full"] * len(order))
            raise CannotEstimate(
                f"Activations need at least {size(least)} with every layer checkpointed, and the budget is "
                f"{size(self.budget_bytes)}; choose a larger budget, shorter sequences or a smaller micro-batch."
            )
        by_index = dict(zip(self.layers, chosen, strict=True))
        self.ways = tuple(by_index[index] for index in order)


def _measure(layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> LayerBytes:
    """Run a layer once and let go of everything: what dies with its graph is what it would have kept."""
    import torch
    from torch.autograd.graph import saved_tensors_hooks

    given = _tensors((args, kwargs))
    owned = [*layer.parameters(), *layer.buffers()]
    saved, results = _Storages(), _Storages()
    devices = [given[0].device] if given[0].device.type != "cpu" else []
    with (
        torch.random.fork_rng(devices=devices, device_type=given[0].device.type if devices else "cuda"),
        saved_tensors_hooks(saved.add, lambda nothing: nothing),
        _results_noted(results),
    ):
        forward(*args, **kwargs)
    owned_or_given = _Storages(*owned, *given)
    casts = sum(saved.sizes.values()) - saved.gone_bytes() - saved.shared_bytes(owned_or_given)
    of_input = _Storages(given[0])
    inputs = sum(of_input.sizes.values())
    return LayerBytes(
        full=inputs,
        selective=inputs + results.gone_bytes(),
        none=saved.gone_bytes() + casts + saved.shared_bytes(of_input),
        again=inputs + saved.gone_bytes() + casts,
        idle=results.gone_bytes(saved),
    )


@contextmanager
def _results_noted(results: _Storages) -> Iterator[None]:
    """Note what `selective` would keep."""
    from torch.utils._python_dispatch import TorchDispatchMode

    ops = set(saved_ops())

    class Noting(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = op(*args, **(kwargs or {}))
            if op in ops:
                for tensor in _tensors(output):
                    results.add(tensor)
            return output

    with Noting():
        yield


class _Storages:
    """The memory behind tensors, each piece once, without keeping it alive."""

    def __init__(self, *tensors: Tensor) -> None:
        self.sizes: dict[int, int] = {}
        self.references: dict[int, Any] = {}
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        """Note a tensor."""
        from torch.multiprocessing.reductions import StorageWeakRef

        storage = tensor.untyped_storage()
        key = storage._cdata  # the reference keeps the number from being given to another storage
        self.references[key] = StorageWeakRef(storage)
        self.sizes[key] = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES

    def gone_bytes(self, but_for: _Storages | None = None) -> int:
        """Bytes of those that are not alive any more, without those that are in `but_for`."""
        left_out = but_for.sizes if but_for is not None else {}
        return sum(
            size_bytes
            for key, size_bytes in self.sizes.items()
            if key not in left_out and self.references[key].expired()
        )

    def shared_bytes(self, other: _Storages) -> int:
        """Bytes of those that are in `other` too."""
        return sum(size_bytes for key, size_bytes in self.sizes.items() if key in other.sizes)


def _tensors(values: Any) -> list[Tensor]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _looks(tensor: Tensor) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


BUDGET: Final = Technique(option="checkpointing", values=("budget=SIZE",), apply=apply)
