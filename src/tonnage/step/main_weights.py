"""fp32 master weights and gradients beside a network of narrower dtype, as Megatron keeps them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# torch 2.13 renamed both; the old names will be removed
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Slice = tuple[nn.Parameter, int, int]
"""A parameter and the range of its flattened elements that lies in a rank's piece."""


class MainOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """Updates fp32 copies of the parameters from fp32 gradients that backward accumulates in one buffer.

    `new` makes the optimizer of the copies.  With `pieces` > 1 this rank keeps only the copies of its piece; with
    `adds_up` the buffer is averaged over the ranks of `group` (None: all) before the step.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        new: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        *,
        pieces: int = 1,
        piece: int = 0,
        adds_up: bool = False,
        group: Any = None,
    ) -> None:
        self._pieces, self._adds_up, self._group = pieces, adds_up, group
        device = parameters[0].device
        total = sum(parameter.numel() for parameter in parameters)
        piece_elements = -(-total // pieces)
        self._gradients = torch.zeros(piece_elements * pieces, dtype=torch.float32, device=device)
        self._weights = _merge_into_buffer(parameters, piece_elements * pieces) if pieces > 1 else None
        _add_gradients_to(self._gradients, parameters)
        begin = piece * piece_elements
        self._own = slice(begin, begin + piece_elements)
        self.slices = _slices_between(parameters, begin, begin + piece_elements)
        """The part of a parameter of which each copy is one."""
        copies = [nn.Parameter(_view(part).float()) for part in self.slices]
        for copy, gradient, (parameter, _, _) in zip(copies, self._own_gradients(), self.slices, strict=True):
            copy.grad = gradient
            copy.divided = getattr(parameter, "divided", False)  # among ranks of tp
        for copy, (parameter, begin, _) in zip(copies, self.slices, strict=True):
            copy.range_of = begin, parameter.numel()  # by which checkpoints divide it among other ranks
        self.parts = {"optimizer": new(copies)}
        super().__init__(copies, self.parts["optimizer"].defaults)
        self._share_with_inner()

    def _share_with_inner(self) -> None:
        """Expose the groups and states of the optimizer of the copies as this one's."""
        inner = self.parts["optimizer"]
        self.param_groups, self.state = inner.param_groups, inner.state

    def _own_gradients(self) -> list[torch.Tensor]:
        """Return the views of the buffer that belong to this rank's copies."""
        ends = [0]
        for _, begin, end in self.slices:
            ends.append(ends[-1] + end - begin)
        own = self._gradients[self._own]
        cuts = zip(self.slices, pairwise(ends), strict=True)
        return [own[begin:end].view(_view(part).shape) for part, (begin, end) in cuts]

    def step(self, closure: Any = None) -> None:
        """Average the gradients over the ranks, update the copies, and write them to the network."""
        self._average_gradients()
        self.parts["optimizer"].step()
        for part, copy in zip(self.slices, self.param_groups[0]["params"], strict=True):
            _view(part).copy_(copy.detach())
        if self._weights is not None:
            _gather(self._weights, self._weights[self._own], group=self._group)

    def _average_gradients(self) -> None:
        if not self._adds_up:
            return
        self._gradients.div_(dist.get_world_size(self._group))
        if self._pieces > 1:
            _reduce_scatter(self._gradients[self._own], self._gradients, group=self._group)
        else:
            dist.all_reduce(self._gradients, group=self._group)

    def state_dict(self) -> dict[str, Any]:
        """Return the states and the fp32 weights of this rank."""
        copies = self.param_groups[0]["params"]
        weights = [copy.detach() for copy in copies]
        return {"optimizer": self.parts["optimizer"].state_dict(), "weights": weights}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned; weights are copied into the existing tensors."""
        self.parts["optimizer"].load_state_dict(state_dict["optimizer"])
        self._share_with_inner()
        for copy, saved in zip(self.param_groups[0]["params"], state_dict["weights"], strict=True):
            copy.detach().copy_(saved)

    def reload(self) -> None:
        """Copy the network's weights again after something else changed them."""
        for part, copy in zip(self.slices, self.param_groups[0]["params"], strict=True):
            copy.detach().copy_(_view(part))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Fill the buffer with zeros; it keeps its memory whatever `set_to_none` says."""
        self._gradients.zero_()


def _add_gradients_to(buffer: torch.Tensor, parameters: list[nn.Parameter]) -> None:
    """Make backward add each gradient to its part of the buffer and free it."""
    begin = 0
    for parameter in parameters:
        part = buffer[begin : begin + parameter.numel()].view(parameter.shape)
        parameter.register_post_accumulate_grad_hook(_accumulate_into(part))
        begin += parameter.numel()


def _accumulate_into(part: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def hook(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        part.add_(parameter.grad)
        parameter.grad = None

    return hook


def _merge_into_buffer(parameters: list[nn.Parameter], size: int) -> torch.Tensor:
    """Move the parameters into one tensor of `size` elements, so that a single all-gather updates them all."""
    buffer = torch.zeros(size, dtype=parameters[0].dtype, device=parameters[0].device)
    begin = 0
    for parameter in parameters:
        part = buffer[begin : begin + parameter.numel()].view(parameter.shape)
        part.copy_(parameter.detach())
        parameter.data = part
        begin += parameter.numel()
    return buffer


def _slices_between(parameters: list[nn.Parameter], begin: int, end: int) -> list[Slice]:
    """Return the slices of parameters that lie between two elements of their concatenation."""
    slices: list[Slice] = []
    start = 0
    for parameter in parameters:
        low, high = max(begin - start, 0), min(end - start, parameter.numel())
        if low < high:
            slices.append((parameter, low, high))
        start += parameter.numel()
    return slices


def _view(part: Slice) -> torch.Tensor:
    """Return a view of the slice's elements, in the parameter's shape if the slice is all of it."""
    parameter, begin, end = part
    if end - begin == parameter.numel():
        return parameter.detach()
    return parameter.detach().view(-1)[begin:end]
