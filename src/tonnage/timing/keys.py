"""Caches of costs, keyed by the fields of a Work that each cost depends on.

A search prices thousands of works that differ in a few fields.  `cached_by(layer_key)` computes a function of a Shape
and a Work once for all works that have the same `layer_key`: layers take as long for a micro-batch whatever becomes
of their gradients.
"""

from collections.abc import Callable, Hashable
from dataclasses import fields
from functools import wraps
from operator import attrgetter
from typing import Final, TypeVar, TypeVarTuple

from tonnage.timing.shape import Shape
from tonnage.timing.work import Work

_MOST: Final = 8192
"""Entries of one cache; beyond, it is emptied."""

_Rest = TypeVarTuple("_Rest")
_Cost = TypeVar("_Cost")


def cached_by(
    key: Callable[[Work], Hashable],
) -> Callable[[Callable[[Shape, Work, *_Rest], _Cost]], Callable[[Shape, Work, *_Rest], _Cost]]:
    """Return a decorator that caches a function by its arguments, with `key(work)` in place of the work."""

    def decorate(compute: Callable[[Shape, Work, *_Rest], _Cost]) -> Callable[[Shape, Work, *_Rest], _Cost]:
        costs: dict[Hashable, _Cost] = {}

        @wraps(compute)
        def cached(shape: Shape, work: Work, *rest: *_Rest) -> _Cost:
            at = (shape, key(work), *rest)
            cost = costs.get(at)
            if cost is None:
                cost = compute(shape, work, *rest)
                if len(costs) >= _MOST:
                    costs.clear()
                costs[at] = cost
            return cost

        return cached

    return decorate


_BESIDE_LAYERS: Final = (
    *("axes", "grad_accum", "schedule", "virtual_stages", "stage_layers"),
    *("gradient_bytes", "whole_gradient_bytes", "main_weights", "optimizer", "clipped"),
    *("shard", "bucketed", "unpacked", "weights_stay", "averages_each"),
    *("optimizer_offload", "param_offload", "activation_offload", "copies_beside"),
)
"""Fields of a Work that the time of layers does not depend on, and the axes, of which it depends on some."""

_BESIDE_WEIGHTS: Final = (
    *("micro_batch", "grad_accum", "accumulated_bytes", "schedule", "virtual_stages", "stage_layers"),
    *("checkpointing", "checkpointed_fraction", "repeats_to_end", "attention", "masked"),
    *("activation_offload", "copies_beside"),
)
"""Fields of a Work that exchanges and updates of weights do not depend on."""


def _others(names: tuple[str, ...]) -> Callable[[Work], tuple[object, ...]]:
    """Return a function that reads the fields of a Work that are not among `names`."""
    return attrgetter(*(item.name for item in fields(Work) if item.name not in names))


_layer_fields: Final = _others(_BESIDE_LAYERS)


def layer_key(work: Work) -> Hashable:
    """Return the facts that the time of layers, of the embedding and of the head depends on, for one micro-batch.

    Of a pipeline's stages that is only whether there are several.
    """
    axes = work.axes
    return _layer_fields(work), axes.pp > 1, axes.cp, axes.tp, axes.ep


weight_key: Final = _others(_BESIDE_WEIGHTS)
"""Return the facts that dividing, exchanging and updating weights depends on."""
