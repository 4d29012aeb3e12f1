"""transformers' attention masks: whether there is padding, and which tokens are one sequence."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .policy import Policy


def patch(policy: Policy, module: ModuleType) -> None:
    torch = policy.torch
    if hasattr(module, "fast_all"):
        original_all = module.fast_all

        def fast_all(mask: Any) -> Any:
            result = original_all(mask)
            if not mask.is_cuda or policy.torch.compiler.is_compiling():
                return result
            values = policy.read(mask)
            if values is None:
                policy.use("padding")
                return True
            return bool(values.all())

        module.fast_all = fast_all  # type: ignore[attr-defined]
    if hasattr(module, "find_packed_sequence_indices"):
        original_packed = module.find_packed_sequence_indices

        def find_packed_sequence_indices(position_ids: Any) -> Any:
            with policy.covered():
                result = original_packed(position_ids)
            if not position_ids.is_cuda or policy.torch.compiler.is_compiling():
                return result
            values = policy.read(position_ids)
            if values is None:
                policy.use("packing")
                return None
            found = original_packed(values)
            return None if found is None else found.to(position_ids.device)

        module.find_packed_sequence_indices = find_packed_sequence_indices  # type: ignore[attr-defined]
    if hasattr(module, "_preprocess_mask_arguments"):
        original_arguments = module._preprocess_mask_arguments

        def _preprocess_mask_arguments(*args: Any, **kwargs: Any) -> Any:
            """A mask from the data loader becomes one of booleans by a kernel: its values are still known."""
            result = original_arguments(*args, **kwargs)
            given = kwargs["attention_mask"] if "attention_mask" in kwargs else args[2]
            made = result[1]
            if isinstance(given, torch.Tensor) and isinstance(made, torch.Tensor) and made is not given:
                values = None if torch.compiler.is_compiling() or not made.is_cuda else policy.read(given)
                if values is not None:
                    made.copy_(values.to(made.dtype))
            return result

        module._preprocess_mask_arguments = _preprocess_mask_arguments  # type: ignore[attr-defined]
