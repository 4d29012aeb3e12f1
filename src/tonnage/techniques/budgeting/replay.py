"""A layer that runs again in part: the two halves of torch's selective checkpointing for a choice of kept pieces.

In forward, results of the kept pieces are held; in backward they are returned instead of computed, and of the rest
only what is needed runs (torch's own contexts run all of it).  An operation that is spared returns uninitialised
memory, which nothing reads.

A layer that does not run the recorded operations runs again in full except for what was kept, as under torch's
contexts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import SAC_IGNORED_OPS

from tonnage.errors import CannotEstimate
from tonnage.techniques.budgeting.frontier import run_again
from tonnage.techniques.budgeting.hostward import Host, LayerResults, SentResult, detached
from tonnage.techniques.budgeting.recording import Layer


class Action(Enum):
    """The treatment of an operation when the layer runs again."""

    RUNS = 0
    KEPT = 1
    SPARED = 2
    SENT = 3
    """Kept on the host."""


def decisions(layer: Layer, kept: frozenset[int], sent: frozenset[int] = frozenset()) -> tuple[Action, ...]:
    """Return the action for each operation if these pieces are kept, some of them on the host."""
    again = run_again(layer.pieces, kept)

    def action_for(maker: int | None) -> Action:
        if maker is None or maker in again:
            return Action.RUNS
        if maker in sent:
            return Action.SENT
        return Action.KEPT if maker in kept else Action.SPARED

    return tuple(action_for(maker) for maker in layer.makers)


def contexts(
    layer: Layer,
    actions: tuple[Action, ...],
    host: Host | None = None,
    on_deviation: Callable[[], None] = lambda: None,
) -> tuple[_ForwardMode, _BackwardMode]:
    """Return the contexts around a forward and around its repetition: the `context_fn` of torch's checkpoint.

    `host` is where results are sent, if some are.  `on_deviation` is called after a forward that did not run the
    recorded operations.
    """
    tape = _Tape(None if host is None or Action.SENT not in actions else host.begin_layer())
    return _ForwardMode(layer, actions, tape, on_deviation), _BackwardMode(tape)


@dataclass(frozen=True)
class _Shape:
    """Shape, dtype and device of a tensor, to allocate uninitialised memory like it."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> _Shape:
        return _Shape(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def make(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class _Kept:
    """A kept result, and its version then."""

    tensor: torch.Tensor
    version: int

    @staticmethod
    def of(tensor: torch.Tensor) -> _Kept:
        return _Kept(detached(tensor), tensor._version)

    def make(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise CannotEstimate(
                "A result that was kept for backward was changed in place; choose checkpointing full."
            )
        return self.tensor


@dataclass(frozen=True)
class _Entry:
    """One operation of a forward."""

    operation: Any
    action: Action
    result: Any
    """Its result: kept, or as shapes; None if it runs again."""


class _Tape:
    """The operations that one forward ran, and the results that it kept."""

    def __init__(self, sent: LayerResults | None) -> None:
        self.sent = sent
        """Results that are sent to the host."""
        self.entries: list[_Entry | None] = []
        self.deviates = False
        """True if the layer ran other operations than recorded, so that nothing may be spared."""


class _ForwardMode(TorchDispatchMode):  # type: ignore[misc]
    def __init__(
        self, layer: Layer, actions: tuple[Action, ...], tape: _Tape, on_deviation: Callable[[], None]
    ) -> None:
        super().__init__()
        self.layer, self.actions, self.tape, self.on_deviation = layer, actions, tape, on_deviation

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = operation(*args, **(kwargs or {}))
        if operation not in SAC_IGNORED_OPS:
            self._record(operation, output)
        return output

    def _record(self, operation: Any, output: Any) -> None:
        number = len(self.tape.entries)
        recorded = self.layer.operations
        self.tape.deviates |= number >= len(recorded) or recorded[number] is not operation
        action, result = Action.RUNS if self.tape.deviates else self.actions[number], None
        if action is not Action.RUNS:
            result = tree_map_only(torch.Tensor, self._keeper(action), output)
        self.tape.entries.append(_Entry(operation, action, result))

    def _keeper(self, action: Action) -> Callable[[torch.Tensor], Any]:
        if action is Action.SENT:
            assert self.tape.sent is not None
            return self.tape.sent.send
        return _Kept.of if action is Action.KEPT else _Shape.of

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.tape.deviates |= len(self.tape.entries) < len(self.layer.operations)
        if self.tape.deviates:
            self.on_deviation()
        earlier = self.tape.sent.previous() if self.tape.sent is not None else None
        if earlier is not None:
            earlier.free_on_card()


class _BackwardMode(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, tape: _Tape) -> None:
        super().__init__()
        self.tape, self.number = tape, 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation in SAC_IGNORED_OPS:
            return operation(*args, **(kwargs or {}))
        entry = self._next(operation)
        if entry.action is Action.RUNS or (entry.action is Action.SPARED and self.tape.deviates):
            return operation(*args, **(kwargs or {}))
        return tree_map_only((_Kept, _Shape, SentResult), self._restore, entry.result)

    def __enter__(self) -> Any:
        sent = self.tape.sent
        if sent is not None:
            with torch.no_grad():
                sent.fetch()
                earlier = sent.previous()
                if earlier is not None:
                    earlier.fetch()
        return super().__enter__()

    def _restore(self, held: Any) -> torch.Tensor:
        if isinstance(held, SentResult):
            assert self.tape.sent is not None
            return self.tape.sent.take(held)
        tensor: torch.Tensor = held.make()
        return tensor

    def _next(self, operation: Any) -> _Entry:
        """Return forward's entry of the current operation, and remove it from the tape."""
        entries, number = self.tape.entries, self.number
        self.number += 1
        entry = entries[number] if number < len(entries) else None
        if entry is None or entry.operation is not operation:
            raise CannotEstimate(
                "A layer does not run the same operations in backward as in forward, or runs twice; choose "
                "checkpointing full."
            )
        entries[number] = None
        return entry
