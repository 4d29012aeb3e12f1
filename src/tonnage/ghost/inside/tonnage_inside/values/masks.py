"""transformers' attention masks: whether there is padding, and which tokens are one sequence."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .policy import Policy


def patch(policy: Policy, module: ModuleType) -> None:
    """Patch `transformers.masking_utils`; older versions lack some of the functions."""
    for name, patched in (
        ("fast_all", _without_padding),
        ("find_packed_sequence_indices", _one_sequence),
        ("_preprocess_mask_arguments", _known_arguments),
    ):
        if hasattr(module, name):
            setattr(module, name, patched(policy, getattr(module, name)))


def _without_padding(policy: Policy, original: Callable[..., Any]) -> Callable[..., Any]:
    def fast_all(mask: Any) -> Any:
        result = original(mask)
        if not _is_asked(policy, mask):
            return result
        values = policy.read(mask)
        if values is None:
            policy.use("padding")
            return True
        return bool(values.all())

    return fast_all


def _one_sequence(policy: Policy, original: Callable[..., Any]) -> Callable[..., Any]:
    def find_packed_sequence_indices(position_ids: Any) -> Any:
        with policy.covered():
            result = original(position_ids)
        if not _is_asked(policy, position_ids):
            return result
        values = policy.read(position_ids)
        if values is None:
            policy.use("packing")
            return None
        indices = original(values)
        return None if indices is None else indices.to(position_ids.device)

    return find_packed_sequence_indices


def _known_arguments(policy: Policy, original: Callable[..., Any]) -> Callable[..., Any]:
    torch = policy.torch

    def _preprocess_mask_arguments(*args: Any, **kwargs: Any) -> Any:
        """Keep the values of a mask from the data loader known, which a kernel converts to booleans."""
        result = original(*args, **kwargs)
        given = kwargs["attention_mask"] if "attention_mask" in kwargs else args[2]
        made = result[1]
        if isinstance(given, torch.Tensor) and isinstance(made, torch.Tensor) and made is not given:
            values = policy.read(given) if _is_asked(policy, made) else None
            if values is not None:
                made.copy_(values.to(made.dtype))
        return result

    return _preprocess_mask_arguments


def _is_asked(policy: Policy, tensor: Any) -> bool:
    """Return whether a tensor is on the card and no graph is being compiled."""
    return not policy.torch.compiler.is_compiling() and bool(tensor.is_cuda)
