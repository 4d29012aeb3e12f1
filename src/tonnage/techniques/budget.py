"""Checkpointing under a budget: `budget=SIZE` bytes of activations on each rank, at any moment.

Layers are measured where they run.  In the first micro-batch all layers are checkpointed, and the first layer of each
kind runs once more to record its operations and what autograd would save (`recording`).  From these follows what each
further byte saves in that layer (`frontier`); after the micro-batch each layer gets the treatment that takes the
fewest seconds in all within the budget (`layerwise`), and all further micro-batches run so (`replay`).

The budget counts what the report calls activations: what layers save for backward (with the casts of their weights
that autocast makes), what is saved before and after them, and what layers hold while they run again.  Casts of
checkpointed layers are freed when forward is over, and count as workspace.  Sizes are those of whole blocks of 512
bytes; the slack of up to 1 MiB that the caching allocator may leave behind a block is not included.
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
from tonnage.techniques.budgeting.measurement import Measured, Storages, measure, tensors_in
from tonnage.techniques.checkpointing import layer_lists_of
from tonnage.techniques.technique import Refusal, Technique
from tonnage.units import format_size, parse_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from tonnage.case import Case
    from tonnage.step.step import Step


FINE: Final = 1 / 100
"""Treatments of a layer that differ by less than this fraction of its seconds count as equal."""


SENDS: Final = "cpu-streamed"
"""The activation offload under which a part of what is kept waits on the host."""


@dataclass(frozen=True)
class Checkpointed:
    """A layer that runs again, except for some of its pieces."""

    measured: Measured
    """The layer."""
    kept: frozenset[int]
    """The pieces that are kept besides the input."""
    again: frozenset[int]
    """The pieces that run again."""
    sent: frozenset[int] = frozenset()
    """The kept pieces that wait on the host."""

    @property
    def flops(self) -> float:
        """Return the floating-point operations that run again."""
        return sum(self.measured.layer.flops[index] for index in self.again)

    @property
    def seconds(self) -> float:
        """Return the GPU's seconds for what runs again."""
        return sum(self.measured.layer.pieces[index].seconds for index in sorted(self.again, reverse=True))

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that wait on the host."""
        return sum(self.measured.layer.pieces[index].bytes for index in self.sent)


def ways(measured: Measured, link_bytes_per_second: float = 0.0, kernel_seconds: float = 0.0) -> tuple[Way, ...]:
    """Return the treatments of a layer, from running all again to keeping everything, whose `treatment` is None.

    If nothing is kept, all pieces run again up to the last one that backward needs.  Of what is kept, as much waits
    on the host as the link can copy while such a layer computes.  `kernel_seconds` is the host's time for each
    kernel.
    """
    pieces, given = measured.layer.pieces, measured.given
    end = max((index + 1 for index, piece in enumerate(pieces) if piece.saved), default=0)
    full = Checkpointed(measured, frozenset(), frozenset(range(end)))
    launching = kernel_seconds * sum(1 for maker in measured.layer.makers if maker is not None)
    options = [Way(given, measured.again, _added_seconds(full, launching), full)]
    saved, before = held_again(pieces, frozenset()), full.seconds
    for point in frontier(pieces):
        if point.seconds > before - FINE * full.seconds:
            continue
        sent = _choose_sent(pieces, point.kept, int(link_bytes_per_second * full.seconds))
        partly = Checkpointed(measured, point.kept, run_again(pieces, point.kept), sent)
        kept_bytes = given + point.bytes - partly.sent_bytes
        if kept_bytes < measured.saved:
            before = point.seconds
            again = measured.again + held_again(pieces, point.kept) - saved
            options.append(Way(kept_bytes, again, _added_seconds(partly, launching), partly))
    return (*options, Way(measured.saved, None, 0.0))


def _added_seconds(treatment: Checkpointed, launching: float) -> float:
    """Return the seconds that a layer takes longer than without checkpointing: the GPU's, or the host's if it is
    slower.

    A backward is taken for twice a forward.  `launching` is the host's time for a forward; if a part is kept, the
    host looks at each operation in Python, in forward and when it runs again.
    """
    from tonnage.timing.software import CHOOSING  # imported here because reading the command line needs no time model

    card = 3 * sum(piece.seconds for piece in treatment.measured.layer.pieces)
    host = 3 * launching
    looking = 2 * CHOOSING * launching if treatment.kept else 0.0
    return max(card + treatment.seconds, host + launching + looking) - max(card, host)


def _choose_sent(pieces: Sequence[Piece], kept: frozenset[int], room_bytes: int) -> frozenset[int]:
    """Return the kept pieces that are sent to the host."""
    if room_bytes == 0:
        return frozenset()
    from tonnage.techniques.budgeting import hostward

    order = sorted(kept)
    return frozenset(order[place] for place in hostward.fitting([pieces[index].bytes for index in order], room_bytes))


def accepts(case: Case) -> Refusal | None:
    """Refuse treatments that ranks could choose differently although they exchange data inside a layer.

    If all that is kept goes to the host, nothing on the GPU is left to choose.
    """
    plan = case.plan
    if plan.activation_offload == "cpu":
        return Refusal(
            technique=f"checkpointing={plan.checkpointing}",
            reason="activation-offload cpu sends all that is kept to the host, so a budget on the GPU has no use",
            instead=f"choose activation-offload {SENDS}, or checkpointing full",
        )
    if plan.ep > 1:
        return Refusal(
            technique=f"checkpointing={plan.checkpointing}",
            reason="with divided experts each rank gets other tokens, and would choose differently from its peers",
            instead="choose checkpointing selective",
        )
    return None


def apply(step: Step) -> Step:
    """Measure the first micro-batch, then checkpoint as `choose` decides."""
    plan = step.plan
    budget = _Budget(parse_bytes(plan.checkpointing.partition("=")[2]), sends=plan.activation_offload == SENDS)
    return replace(step, changes=(*step.changes, budget.install), contexts=(*step.contexts, budget.micro_batch))


class _Budget:
    """The measurements of one network, and the treatment that follows for each layer."""

    def __init__(self, budget_bytes: int, *, sends: bool) -> None:
        self.budget_bytes, self.sends = budget_bytes, sends
        self.host: Any = None
        """The host memory to which results are sent; None: none are."""
        self.chosen: tuple[Way, ...] | None = None
        """The treatment of each layer; None while the first micro-batch measures."""
        self.kinds: dict[Any, tuple[Way, ...]] = {}
        """The measured options, by what makes layers alike."""
        self.layers: dict[int, tuple[Way, ...]] = {}
        """The options of each layer by its index, in the order in which they ran."""
        self.inputs, self.before, self.after = Storages(), Storages(), Storages()
        self.last = 0
        self.module: nn.Module | None = None
        self.network: Network | None = None
        """The options of all layers, as measured."""
        self.deviating: set[int] = set()
        """Indices of layers that later ran other operations."""

    def install(self, module: nn.Module) -> nn.Module:
        """Make every layer run as this budget decides."""
        layers = [layer for layer_list in layer_lists_of(module) for layer in layer_list]
        self.last, self.module = len(layers) - 1, module
        for index, layer in enumerate(layers):
            layer.forward = partial(self.run, index, layer, layer.forward)  # type: ignore[method-assign]
        return module

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Wrap forward and backward of each micro-batch; in the first one, record what is saved outside the
        layers.
        """
        from torch.autograd.graph import saved_tensors_hooks

        if self.chosen is not None:
            yield
            return
        with saved_tensors_hooks(self._record_outside, lambda tensor: tensor):
            yield
        if self.layers:  # an evaluation keeps nothing
            self._decide()

    def run(self, index: int, layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one layer's forward, called by the network."""
        import torch
        from torch.utils.checkpoint import checkpoint

        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if self.chosen is None:
            return self._first_run(index, layer, forward, args, kwargs)
        treatment = self.chosen[index].treatment
        if treatment is None:
            return forward(*args, **kwargs)
        on_deviation = partial(self._mark_deviating, index)
        options = {"context_fn": partial(_contexts, treatment, self.host, on_deviation)} if treatment.kept else {}
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, **options)

    def _first_run(self, index: int, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a layer checkpointed, and measure it afterwards: it may create something only when it first runs.

        bitsandbytes' layers cast their biases then.
        """
        from torch.utils.checkpoint import checkpoint

        output = checkpoint(partial(forward, **kwargs), *args, use_reentrant=False)
        self.layers[index] = self._measure(layer, forward, args, kwargs)
        return output

    def _measure(self, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Way, ...]:
        from tonnage.techniques.budgeting import prices

        given = tensors_in((args, kwargs))
        self.inputs.add(given[0])
        for tensor in given[1:]:  # masks and positions, which many layers share
            self.before.add(tensor)
        kind = (type(layer), *(_signature(tensor) for tensor in [*layer.parameters(), *given]))
        if kind not in self.kinds:
            device = given[0].device
            measured = measure(layer, forward, args, kwargs)
            self.kinds[kind] = ways(measured, self._link_speed(device), prices.kernel_seconds(device))
        return self.kinds[kind]

    def _link_speed(self, device: torch.device) -> float:
        """Return bytes per second of the link to the host; zero if nothing is to be sent."""
        if not self.sends:
            return 0.0
        from tonnage.techniques.budgeting import hostward, prices

        self.host = self.host or hostward.Host(device)
        return prices.link_bytes_per_second(device)

    def _record_outside(self, tensor: Tensor) -> Tensor:
        (self.after if self.last in self.layers else self.before).add(tensor)
        return tensor

    def _decide(self) -> None:
        """Choose the treatments; called after a backward, when whatever is still alive was not saved for it."""
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
                f"Activations need at least {format_size(network.least)} with every layer checkpointed, "
                f"and the budget is "
                f"{format_size(self.budget_bytes)}; choose a larger budget, shorter sequences or a "
                f"smaller micro-batch."
            )
        by_index = dict(zip(self.layers, chosen, strict=True))
        self.chosen = tuple(by_index[index] for index in sorted(by_index))
        self.network = network
        self._store_summary()

    def _mark_deviating(self, index: int) -> None:
        """Note that a layer ran other operations than measured, so that all of it runs again."""
        if index not in self.deviating:
            self.deviating.add(index)
            self._store_summary()

    def _store_summary(self) -> None:
        """Store on the network what runs again, for the Trace."""
        assert self.module is not None
        assert self.chosen is not None
        assert self.network is not None
        chosen = [self.layers[index][0] if index in self.deviating else self.chosen[index] for index in self.layers]
        self.module.run_again = summary(self.network, chosen)


def in_transit(network: Network) -> Network:
    """Return the network with room for results on their way to the host and back, if layers send any.

    At the end of forward those of the last two layers are still on the GPU; while a layer runs again, those of the
    one before it come back.
    """
    sizes = (way.treatment.sent_bytes for ways in network.layers for way in ways if way.treatment is not None)
    in_flight = max(sizes, default=0)
    if in_flight == 0:
        return network
    adjusted = {
        id(ways): tuple(replace(way, again=None if way.again is None else way.again + in_flight) for way in ways)
        for ways in network.layers
    }
    layers = tuple(adjusted[id(ways)] for ways in network.layers)
    return replace(network, layers=layers, after=network.after + 2 * in_flight)


def summary(network: Network, chosen: Sequence[Way]) -> dict[str, Any]:
    """Return the totals of a choice, for one micro-batch."""
    again = [way.treatment for way in chosen if way.treatment is not None]
    all_seconds = sum(ways[0].treatment.seconds for ways in network.layers)
    return {
        "peak_bytes": network.peak(chosen),
        "seconds_fraction": sum(treatment.seconds for treatment in again) / all_seconds if all_seconds else 0.0,
        "flops": sum(treatment.flops for treatment in again),
        "full_flops": sum(ways[0].treatment.flops for ways in network.layers),
        "sent_bytes": sum(treatment.sent_bytes for treatment in again),
        "layers": len(chosen),
        "layers_again": len(again),
        "layers_in_part": sum(1 for treatment in again if treatment.kept),
    }


def _contexts(treatment: Checkpointed, host: Any, on_deviation: Callable[[], None]) -> Any:
    from tonnage.techniques.budgeting import replay

    layer = treatment.measured.layer
    return replay.contexts(layer, replay.decisions(layer, treatment.kept, treatment.sent), host, on_deviation)


def _signature(tensor: Tensor) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


BUDGET: Final = Technique(option="checkpointing", values=("budget=SIZE",), accepts=accepts, apply=apply)
