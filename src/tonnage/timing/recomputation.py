"""Operations of a layer that run again in backward, under each kind of checkpointing."""

from dataclasses import dataclass
from typing import Final

from tonnage.cluster import Device
from tonnage.timing import rates
from tonnage.timing.operations import Operation, Slice
from tonnage.timing.rates import Card, Seconds
from tonnage.timing.shape import Shape
from tonnage.timing.software import Software
from tonnage.timing.work import Work

_ATTENTION: Final = ("attention", "scores", "softmax", "rotation")
_BEFORE_ATTENTION: Final = ("qkv", "query", "key", "value", "query down", "query up", "latent down", "latent up")
_NAMED: Final = {"latent": ("query up", "latent up", "rotation"), "norms": ("norms", "activation", "clamp")}
_AROUND_EXPERTS: Final = ("router", "shared up", "shared down", "routing", "norms", "activation", "clamp")
_LAST: Final = {"full": "down", "attention-module": "output"}
"""Last product of the parts that run again whole."""

BY_OPERATION: Final = ("selective", "alternate")
"""Kinds of checkpointing that decide for each operation, in Python, whether it runs again."""


@dataclass(frozen=True, slots=True)
class Recomputation:
    """Part of a network that runs again in backward."""

    kind: str
    """Part of a layer that runs again: one of `work.RECOMPUTED`."""
    fraction: float
    """Part of the layers that run again."""
    stops_early: bool
    """True if the last product is left out."""

    def repeats(self, operation: Operation) -> bool:
        """Return True if an operation of a layer that is checkpointed runs again."""
        name, family = operation.name, operation.family
        if self.stops_early and name == _LAST.get(self.kind):
            return False
        if self.kind == "attention":
            return name in _ATTENTION
        if self.kind == "attention-module":
            return name in (*_BEFORE_ATTENTION, *_ATTENTION, "output")
        if self.kind in BY_OPERATION:
            return family not in ("matmul", "attention", "copy")
        if self.kind == "experts":
            return operation.grouped or name in _AROUND_EXPERTS
        if self.kind in _NAMED:
            return name in _NAMED[self.kind]
        return self.kind == "full"


def plan_recomputation(shape: Shape, work: Work, software: Software) -> Recomputation:
    """Return which part of the network runs again.

    The last product, whose result nobody keeps, need not be computed again by torch, unless it goes through a norm or
    dropout, or adapters follow the product.
    """
    followed = shape.ends_in_norm or shape.dropout or work.lora_rank > 0
    stops_early = software.stops_early and not work.repeats_to_end and not followed
    return Recomputation(work.checkpointing, work.checkpointed_fraction, stops_early)


def recomputed_seconds(
    forward: tuple[Operation, ...], part: Slice, device: Device, card: Card, recomputation: Recomputation
) -> Seconds:
    """Return the seconds of the operations of a checkpointed layer's forward pass that run again."""

    def seconds(operations: tuple[Operation, ...]) -> Seconds:
        return rates.seconds(operations, device, card, backend=part.backend, seq_len=part.seq_len)

    again = seconds(tuple(op for op in forward if recomputation.repeats(op)))
    if recomputation.kind == "alternate":
        again += seconds(tuple(op for op in forward if op.family == "matmul")) * 0.5
    return again
