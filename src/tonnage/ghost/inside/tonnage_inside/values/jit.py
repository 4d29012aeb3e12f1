"""Kernels that FlashInfer compiles with nvcc at first use, for minutes: modules of functions that do nothing."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .policy import Policy


class _Nothing:
    """A module whose functions do nothing and mostly return None.

    `init` returns an object of such methods, one that counts ways to run a kernel (`get_tactic_num`) 0, and `plan` a
    plan of attention without numbers.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def __getattr__(self, name: str) -> Callable[..., _Nothing | int | list[int] | None]:
        if name.startswith("__"):
            raise AttributeError(name)

        def do_nothing(*_args: Any, **_kwargs: Any) -> _Nothing | int | list[int] | None:
            self._policy.use("jit")
            if name == "init":
                return self
            if name == "plan":
                return []
            return 0 if name.startswith("get_") and name.endswith(("_num", "_count")) else None

        return do_nothing

    __getitem__ = __getattr__


def patch(policy: Policy, module: ModuleType) -> None:
    """Patch `flashinfer.jit.core`."""

    def build_and_load(_spec: Any, *_args: Any, **_kwargs: Any) -> _Nothing:
        return _Nothing(policy)

    module.JitSpec.build_and_load = build_and_load
