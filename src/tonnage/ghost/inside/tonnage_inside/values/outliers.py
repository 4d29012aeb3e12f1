"""LLM.int8 searches each layer's inputs for columns with large values, which it multiplies, and keeps, in 16 bits.

Computed inputs read as zero, so that there are none.  In trained networks it is about one column of a thousand
(arXiv:2208.07339): next to nothing, but the report names the assumption.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .policy import Policy


def patch(policy: Policy, module: ModuleType) -> None:
    """Patch `bitsandbytes.functional`."""
    for name in ("int8_vectorwise_quant", "int8_double_quant"):
        if hasattr(module, name):
            setattr(module, name, _note_threshold(policy, getattr(module, name)))


def _note_threshold(policy: Policy, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def quantized(A: Any, *args: Any, threshold: float = 0.0, **kwargs: Any) -> Any:
        if threshold > 0.0 and A.is_cuda:
            policy.use("outliers")
        return original(A, *args, threshold=threshold, **kwargs)

    return quantized
