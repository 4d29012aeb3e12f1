"""Lengths that a library computes on the card from known numbers and reads on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .integers import known_integers

if TYPE_CHECKING:
    from .policy import Policy

_OBJECT_EXCHANGES = (
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)


def patch_object_exchange(policy: Policy, module: ModuleType) -> None:
    """Make known the sizes of objects that ranks exchange, whose sum and maximum are computed on the card."""
    integers = known_integers(policy)

    def patched(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def exchange(*args: Any, **kwargs: Any) -> Any:
            with integers():
                return original(*args, **kwargs)

        return exchange

    for name in _OBJECT_EXCHANGES:
        if hasattr(module, name):
            replacement = patched(getattr(module, name))
            setattr(module, name, replacement)
            if hasattr(policy.torch.distributed, name):
                setattr(policy.torch.distributed, name, replacement)


def patch_chunks(policy: Policy, module: ModuleType) -> None:
    """Make known the quotient by which TRL 1.9 to 1.14 divide labels into chunks, computed on the card."""
    name = "_chunked_cross_entropy_loss"
    original = getattr(module, name, None)
    if original is None:
        return
    numbers = known_integers(policy, numbers=True)

    @functools.wraps(original)
    def loss(*args: Any, **kwargs: Any) -> Any:
        with numbers():
            return original(*args, **kwargs)

    setattr(module, name, loss)
