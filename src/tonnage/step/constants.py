"""Known values where nothing is computed: integers and masks that follow from what the program wrote."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

KNOWN_ELEMENTS: Final = 2**20
"""Largest tensor, in elements, that is computed for real if it holds known integers."""


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors among arguments or results."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class KnownValues:
    """Small integer and boolean tensors whose contents follow from constants in the program.

    Token ids, positions and masks decide which way a program goes.  What is computed from them alone is computed for
    real beside the fake tensors, on the host, including views and in-place changes; no other tensor has values.
    """

    def __init__(self) -> None:
        self._real: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def compute(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Return the operation's result on real tensors; None if some arguments are not known."""
        if not all(self._is_known(tensor) for tensor in tensors_in((args, kwargs))):
            return None
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: self._real.get(tensor, tensor), (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        with _disable_current_modes(), torch.no_grad():
            return op(*args, **kwargs)

    def follow(self, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Repeat the operation on real tensors if its arguments are known; else forget the values of what it
        changed.
        """
        results = tensors_in(result)
        if results and all(_may_be_known(tensor) for tensor in results) and "empty" not in op._schema.name:
            known = self.compute(op, args, kwargs)
            if known is not None:
                self.keep(results, known)
                return
        if op._schema.is_mutable:
            for tensor in tensors_in((args, kwargs)):
                self._real.pop(tensor, None)

    def keep(self, results: Any, known: Any) -> None:
        """Remember the values of an operation's results."""
        for fake, real in zip(tensors_in(results), tensors_in(known), strict=True):
            self._real[fake] = real

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, FakeTensor) if tensor not in self._real else True


def _may_be_known(tensor: torch.Tensor) -> bool:
    countable = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    return countable and tensor.numel() <= KNOWN_ELEMENTS and tensor.device.type != "meta"
