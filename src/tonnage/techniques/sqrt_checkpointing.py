"""Checkpointing of segments: the L layers are divided into segments of ceil(sqrt(L)) layers.

Forward keeps only the input of each segment.  Backward runs one segment at a time again, and holds everything that
the layers of this segment save.  With 36 layers these are six inputs, and then the tensors of six layers.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (https://arxiv.org/abs/1604.06174).
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tonnage.mesh import SHARDING
from tonnage.techniques.checkpointing import layer_lists_of
from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    from torch import nn

    from tonnage.case import Case
    from tonnage.step.step import Step


def accepts(case: Case) -> Refusal | None:
    """Refuse FSDP2: it gathers the parameters of a layer when the layer is called.

    A segment that runs again calls the forwards of its layers directly.
    """
    if case.plan.shard in SHARDING:
        return Refusal(
            technique="checkpointing=sqrt",
            reason="FSDP2 gathers the parameters of one layer at a time, and a segment needs those of several",
            instead="choose checkpointing full",
        )
    return None


def apply(step: Step) -> Step:
    """Divide every list of layers into segments."""
    return replace(step, changes=(*step.changes, _divide_into_segments))


def _divide_into_segments(module: nn.Module) -> nn.Module:
    for layers in layer_lists_of(module):
        length = math.isqrt(len(layers) - 1) + 1  # ceil(sqrt(L))
        for start in range(0, len(layers), length):
            _Segment(layers[start : start + length])
    return module


Position = tuple[int, int]
"""Index of the layer in its segment that returned a tensor, and of the tensor in its output."""


@dataclass(frozen=True)
class _OutputReference:
    """Replaces a tensor that an earlier layer of the segment returned, so that it need not be kept."""

    position: Position


class _Segment:
    """Layers that the network calls one after the other, under one checkpoint.

    The checkpoint opens when the first layer is called and closes after the last.  Each call is recorded with all
    its arguments (masks, positions), and with references in place of outputs of earlier layers, so that it can be
    repeated.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self.calls = _Calls()
        self.returned: dict[int, tuple[weakref.ref[Any], Position]] = {}
        self.checkpoint: Generator[None, None, None] | None = None
        self.length = len(layers)
        for index, layer in enumerate(layers):
            layer.forward = partial(self.run, index, layer.forward)  # type: ignore[method-assign]

    def run(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one layer's forward, called by the network."""
        import torch

        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if index == 0:
            self._open(forward, args, kwargs)
        else:
            self._record_call(forward, args, kwargs)
        output = forward(*args, **kwargs)
        for number, tensor in enumerate(_tensors(output)):
            self.returned[id(tensor)] = (weakref.ref(tensor), (index, number))
        if index == self.length - 1:
            self._close()
        return output

    def _open(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> None:
        from torch.utils.checkpoint import _checkpoint_without_reentrant_generator as generator

        self.calls, self.returned = _Calls(), {}
        defaults = [item.default for item in inspect.signature(generator).parameters.values()]
        options = [value for value in defaults if value is not inspect.Parameter.empty]
        self.checkpoint = generator(partial(self.calls.repeat, forward), *options, *args, **kwargs)
        next(self.checkpoint)

    def _record_call(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> None:
        from torch.utils._pytree import tree_map

        from tonnage.errors import CannotEstimate

        given = tree_map(self._refer_to_output, (args, kwargs))
        if not self.calls.add(forward, given):
            raise CannotEstimate(
                "The output of a layer is changed before the next one gets it, so they cannot be checkpointed "
                "together; choose checkpointing full."
            )

    def _refer_to_output(self, leaf: Any) -> Any:
        reference, position = self.returned.get(id(leaf), (None, (0, 0)))
        return _OutputReference(position) if reference is not None and reference() is leaf else leaf

    def _close(self) -> None:
        assert self.checkpoint is not None
        for _ in self.checkpoint:
            raise AssertionError("a checkpoint has one part")
        self.checkpoint, self.calls, self.returned = None, _Calls(), {}


class _Calls:
    """The calls of a segment's layers after the first, and the last call that needs each result."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[..., Any], Any]] = []
        self.last_use: dict[Position, int] = {}

    def add(self, forward: Callable[..., Any], given: Any) -> bool:
        """Record one more call; return True if it takes something from an earlier one."""
        from torch.utils._pytree import tree_leaves

        self.calls.append((forward, given))
        taken = [leaf.position for leaf in tree_leaves(given) if isinstance(leaf, _OutputReference)]
        self.last_use |= dict.fromkeys(taken, len(self.calls))
        return bool(taken)

    def repeat(self, first: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Run all layers again, freeing what no later one takes."""
        from torch.utils._pytree import tree_map

        held = self._outputs_in_use(0, first(*args, **kwargs))
        for index, (forward, given) in enumerate(self.calls, start=1):
            positional, named = tree_map(
                lambda leaf, held=held: held[leaf.position] if isinstance(leaf, _OutputReference) else leaf, given
            )
            held = {position: tensor for position, tensor in held.items() if self.last_use[position] > index}
            output = forward(*positional, **named)
            del positional, named
            held |= self._outputs_in_use(index, output)
            del output

    def _outputs_in_use(self, layer: int, output: Any) -> dict[Position, Any]:
        outputs = (((layer, number), tensor) for number, tensor in enumerate(_tensors(output)))
        return {position: tensor for position, tensor in outputs if position in self.last_use}


def _tensors(output: Any) -> list[Any]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


SQRT_CHECKPOINTING: Final = Technique(option="checkpointing", values=("sqrt",), accepts=accepts, apply=apply)
