"""Checkpointing under a budget: `budget=SIZE` bytes of activations on each rank, at any moment.

Layers are measured where they run: in the first micro-batch, whose layers are all checkpointed, the first layer of
each kind runs once more with nothing recorded but its operations and what autograd would have kept (`replay`).  Of
these follows what each further byte saves in that layer (`frontier`); after the micro-batch each layer gets the way
that takes the fewest seconds in all within the budget (`layerwise`), and all further micro-batches run so.

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
from tonnage.techniques.budgeting.frontier import Piece, frontier, held_again, run_again
from tonnage.techniques.budgeting.layerwise import Network, Way, choose
from tonnage.techniques.checkpointing import layer_lists_of
from tonnage.techniques.technique import Refusal, Technique
from tonnage.units import parse_bytes, size

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from tonnage.case import Case
    from tonnage.step.step import Step
    from tonnage.techniques.budgeting.replay import Layer

FINE: Final = 1 / 100
"""Ways of a layer that differ by less than this part of its seconds are not told apart."""


SENDS: Final = "cpu-streamed"
"""The activation offload under which a part of what is kept waits on the host."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One layer: what it runs, and the bytes around that."""

    layer: Layer
    """Its operations and the memory that they make."""
    given: int
    """Bytes of its input."""
    saved: int
    """Bytes that autograd keeps where the layer is not checkpointed."""
    again: int
    """Most held while the layer runs again: its input, all that autograd saves, and what its code still refers to."""


@dataclass(frozen=True)
class Checkpointed:
    """A layer that runs again, but for some of its pieces."""

    measured: Measured
    """The layer."""
    kept: frozenset[int]
    """The pieces that are kept besides the input."""
    again: frozenset[int]
    """The pieces that run."""
    sent: frozenset[int] = frozenset()
    """Of the pieces that are kept, those that wait on the host."""

    @property
    def flops(self) -> float:
        """Floating-point operations that run again."""
        return sum(self.measured.layer.flops[index] for index in self.again)

    @property
    def seconds(self) -> float:
        """Of the card, for what runs again."""
        return sum(self.measured.layer.pieces[index].seconds for index in sorted(self.again, reverse=True))

    @property
    def sent_bytes(self) -> int:
        """That wait on the host."""
        return sum(self.measured.layer.pieces[index].bytes for index in self.sent)


def ways(measured: Measured, link_bytes_per_second: float = 0.0, kernel_seconds: float = 0.0) -> tuple[Way, ...]:
    """How a layer may be treated, from all running again to everything kept, whose `what` is None.

    Without anything kept all runs again, up to where everything is there that backward needs.  Of what is kept as
    much waits on the host as the link copies while such a layer computes.  `kernel_seconds`: of the host, for each.
    """
    pieces, given = measured.layer.pieces, measured.given
    end = max((index + 1 for index, piece in enumerate(pieces) if piece.saved), default=0)
    full = Checkpointed(measured, frozenset(), frozenset(range(end)))
    launching = kernel_seconds * sum(1 for maker in measured.layer.makers if maker is not None)
    found = [Way(given, measured.again, _longer(full, launching), full)]
    saved, before = held_again(pieces, frozenset()), full.seconds
    for point in frontier(pieces):
        if point.seconds > before - FINE * full.seconds:
            continue
        sent = _fitting(pieces, point.kept, int(link_bytes_per_second * full.seconds))
        what = Checkpointed(measured, point.kept, run_again(pieces, point.kept), sent)
        kept_bytes = given + point.bytes - what.sent_bytes
        if kept_bytes < measured.saved:
            before = point.seconds
            again = measured.again + held_again(pieces, point.kept) - saved
            found.append(Way(kept_bytes, again, _longer(what, launching), what))
    return (*found, Way(measured.saved, None, 0.0))


def _longer(what: Checkpointed, launching: float) -> float:
    """Seconds that a layer takes longer than without checkpointing: of the card, or of the host where it is slower.

    A backward is taken for twice a forward.  `launching`: seconds of the host for a forward; where a part is kept it
    looks at each operation in Python, forward and again.
    """
    from tonnage.timing.software import CHOOSING  # late, as reading the command line needs no costs

    card = 3 * sum(piece.seconds for piece in what.measured.layer.pieces)
    host = 3 * launching
    looking = 2 * CHOOSING * launching if what.kept else 0.0
    return max(card + what.seconds, host + launching + looking) - max(card, host)


def _fitting(pieces: Sequence[Piece], kept: frozenset[int], room_bytes: int) -> frozenset[int]:
    """Of the pieces that are kept, those that are sent to the host."""
    if room_bytes == 0:
        return frozenset()
    from tonnage.techniques.budgeting import hostward

    order = sorted(kept)
    return frozenset(order[place] for place in hostward.fitting([pieces[index].bytes for index in order], room_bytes))


def accepts(case: Case) -> Refusal | None:
    """Ranks choose each for itself, which must be the same wherever they exchange something inside a layer.

    Where all that is kept goes to the host, nothing on the card is left to choose.
    """
    plan = case.plan
    if plan.activation_offload == "cpu":
        return Refusal(
            technique=f"checkpointing={plan.checkpointing}",
            reason="activation-offload cpu sends all that is kept to the host, where no budget of the card is for it",
            instead=f"choose activation-offload {SENDS}, or checkpointing full",
        )
    if plan.ep > 1:
        return Refusal(
            technique=f"checkpointing={plan.checkpointing}",
            reason="with experts divided each rank gets other tokens, and would choose another way than its peers",
            instead="choose checkpointing selective",
        )
    return None


def apply(step: Step) -> Step:
    """Watch the first micro-batch, then checkpoint as `choose` says."""
    plan = step.plan
    budget = _Budget(parse_bytes(plan.checkpointing.partition("=")[2]), sends=plan.activation_offload == SENDS)
    return replace(step, changes=(*step.changes, budget.install), contexts=(*step.contexts, budget.micro_batch))


class _Budget:
    """The measurements of one network, and what follows from them."""

    def __init__(self, budget_bytes: int, *, sends: bool) -> None:
        self.budget_bytes, self.sends = budget_bytes, sends
        self.host: Any = None
        """Where results are sent; None: they are not."""
        self.chosen: tuple[Way, ...] | None = None
        """Of each layer; None while the first micro-batch measures."""
        self.kinds: dict[Any, tuple[Way, ...]] = {}
        """What was measured, by what makes layers alike."""
        self.layers: dict[int, tuple[Way, ...]] = {}
        """By index, in the order in which they ran."""
        self.inputs, self.before, self.after = _Storages(), _Storages(), _Storages()
        self.last = 0
        self.module: nn.Module | None = None
        self.network: Network | None = None
        """As measured."""
        self.astray: set[int] = set()
        """Layers that did something else later."""

    def install(self, module: nn.Module) -> nn.Module:
        """Have every layer ask this budget how it is to run."""
        layers = [layer for found in layer_lists_of(module) for layer in found]
        self.last, self.module = len(layers) - 1, module
        for index, layer in enumerate(layers):
            layer.forward = partial(self.run, index, layer, layer.forward)  # type: ignore[method-assign]
        return module

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Around forward and backward of each micro-batch: in the first, note what is kept outside the layers."""
        from torch.autograd.graph import saved_tensors_hooks

        if self.chosen is not None:
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
        if self.chosen is None:
            return self._first_run(index, layer, forward, args, kwargs)
        what = self.chosen[index].what
        if what is None:
            return forward(*args, **kwargs)
        on_astray = partial(self._went_astray, index)
        options = {"context_fn": partial(_contexts, what, self.host, on_astray)} if what.kept else {}
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, **options)

    def _first_run(self, index: int, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Checkpointed whole, and measured when that is over: a layer may make something once, when it first runs.

        bitsandbytes' layers cast their biases then.
        """
        from torch.utils.checkpoint import checkpoint

        output = checkpoint(partial(forward, **kwargs), *args, use_reentrant=False)
        self.layers[index] = self._measured(layer, forward, args, kwargs)
        return output

    def _measured(self, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Way, ...]:
        from tonnage.techniques.budgeting import prices

        given = _tensors((args, kwargs))
        self.inputs.add(given[0])
        for tensor in given[1:]:  # masks and positions: the same for many layers
            self.before.add(tensor)
        kind = (type(layer), *(_looks(tensor) for tensor in [*layer.parameters(), *given]))
        if kind not in self.kinds:
            device = given[0].device
            measured = measure(layer, forward, args, kwargs)
            self.kinds[kind] = ways(measured, self._link(device), prices.kernel_seconds(device))
        return self.kinds[kind]

    def _link(self, device: torch.device) -> float:
        """Bytes per second of the way to the host; zero if nothing is to go."""
        if not self.sends:
            return 0.0
        from tonnage.techniques.budgeting import hostward, prices

        self.host = self.host or hostward.Host(device)
        return prices.link_bytes_per_second(device)

    def _note_outside(self, tensor: Tensor) -> Tensor:
        (self.after if self.last in self.layers else self.before).add(tensor)
        return tensor

    def _decide(self) -> None:
        """After a backward, when whatever is still alive was not kept for it."""
        network = in_transit(
            Network(
                layers=tuple(self.layers.values()),
                before=self.before.gone_bytes(self.inputs),
                after=self.after.gone_bytes(self.inputs),
            )
        )
        chosen = choose(network, self.budget_bytes)
        if chosen is None:
            raise CannotEstimate(
                f"Activations need at least {size(network.least)} with every layer checkpointed, and the budget is "
                f"{size(self.budget_bytes)}; choose a larger budget, shorter sequences or a smaller micro-batch."
            )
        by_index = dict(zip(self.layers, chosen, strict=True))
        self.chosen = tuple(by_index[index] for index in sorted(by_index))
        self.network = network
        self._sum_up()

    def _went_astray(self, index: int) -> None:
        """A layer did something else than was measured, so that all of it runs again."""
        if index not in self.astray:
            self.astray.add(index)
            self._sum_up()

    def _sum_up(self) -> None:
        """Leave with the network what runs again, for whoever writes the Trace."""
        assert self.module is not None
        assert self.chosen is not None
        assert self.network is not None
        ways = [self.layers[index][0] if index in self.astray else self.chosen[index] for index in self.layers]
        self.module.run_again = summary(self.network, ways)


def in_transit(network: Network) -> Network:
    """The network with room for what is on its way to the host and back, where layers send something.

    At the end of the forward that of the last two layers is still there; while one runs again, that of the one before
    it comes back.
    """
    on_way = max(
        (way.what.sent_bytes for found in network.layers for way in found if way.what is not None), default=0
    )
    if on_way == 0:
        return network
    adjusted = {
        id(found): tuple(replace(way, again=None if way.again is None else way.again + on_way) for way in found)
        for found in network.layers
    }
    layers = tuple(adjusted[id(found)] for found in network.layers)
    return replace(network, layers=layers, after=network.after + 2 * on_way)


def summary(network: Network, chosen: Sequence[Way]) -> dict[str, Any]:
    """What a choice comes to, for one micro-batch."""
    again = [way.what for way in chosen if way.what is not None]
    all_seconds = sum(found[0].what.seconds for found in network.layers)
    return {
        "peak_bytes": network.peak(chosen),
        "seconds_fraction": sum(what.seconds for what in again) / all_seconds if all_seconds else 0.0,
        "flops": sum(what.flops for what in again),
        "full_flops": sum(found[0].what.flops for found in network.layers),
        "sent_bytes": sum(what.sent_bytes for what in again),
        "layers": len(chosen),
        "layers_again": len(again),
        "layers_in_part": sum(1 for what in again if what.kept),
    }


def _contexts(what: Checkpointed, host: Any, on_astray: Callable[[], None]) -> Any:
    from tonnage.techniques.budgeting import replay

    layer = what.measured.layer
    return replay.contexts(layer, replay.decisions(layer, what.kept, what.sent), host, on_astray)


def measure(layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Measured:
    """Run a layer once and let go of everything: what dies with its graph is what it would have kept."""
    import torch
    from torch.autograd.graph import saved_tensors_hooks

    from tonnage.techniques.budgeting import prices, replay

    given = _tensors((args, kwargs))
    device = given[0].device
    saved = _Storages()
    writing = replay.Writing([*layer.parameters(), *layer.buffers(), *given], device, prices.on(device))

    def keep(tensor: Tensor) -> None:
        saved.add(tensor)
        writing.save(tensor)

    devices = [device] if device.type != "cpu" else []
    with (
        torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"),
        saved_tensors_hooks(keep, lambda nothing: nothing),
        _every_cast_seen(),
        writing.mode(),
    ):
        forward(*args, **kwargs)
    of_input = _Storages(given[0])
    inputs = sum(of_input.sizes.values())
    seen = writing.layer()
    lingering = sum(piece.bytes for piece in seen.pieces if piece.lingers and not piece.saved)
    return Measured(
        layer=seen,
        given=inputs,
        saved=saved.gone_bytes() + saved.shared_bytes(of_input),
        again=inputs + saved.gone_bytes() + lingering,
    )


@contextmanager
def _every_cast_seen() -> Iterator[None]:
    """Autocast casts weights anew, as it does when a layer runs for the first time or again."""
    import torch

    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


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

        from tonnage.techniques.budgeting import replay

        for part in replay.plain(tensor):
            storage = part.untyped_storage()
            key = storage._cdata  # the reference keeps the number from being given to another storage
            self.references[key] = StorageWeakRef(storage)
            self.sizes[key] = replay.blocks(storage.nbytes())

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


BUDGET: Final = Technique(option="checkpointing", values=("budget=SIZE",), accepts=accepts, apply=apply)
