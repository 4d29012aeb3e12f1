"""Kernels that libraries compile when they are first used: functions that do nothing take their place.

FlashInfer and SGLang run nvcc for minutes.  CUTLASS's DSL for Python needs none, but its compiled code brings a CUDA
runtime of its own, which asks NVIDIA's driver for more than is public.  They write into tensors of their caller.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .policy import Policy


class _Nothing:
    """A compiled kernel, or a module of such, that does nothing and returns None.

    `init` returns an object of such methods.  No kernel can be run: one that counts ways (`get_tactic_num`)
    returns 0, one that lists them (`get_valid_tactics_for_shape`) an empty list, as one that plans attention does.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def __getattr__(self, name: str) -> Callable[..., _Nothing | list[Any] | int | None]:
        if name.startswith("__"):
            raise AttributeError(name)

        def do_nothing(*_args: Any, **_kwargs: Any) -> _Nothing | list[Any] | int | None:
            self._policy.use("jit")
            if name == "init":
                return self
            if "get_valid_" in name or name.endswith("plan"):
                return []
            return 0 if name.startswith("get_") and name.endswith(("_num", "_count")) else None

        return do_nothing

    __getitem__ = __getattr__

    def __call__(self, *_args: Any, **_kwargs: Any) -> None:
        self._policy.use("jit")


class _Undescribed:
    """A module of kernels of which nothing is known: it has no files."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def build_and_load(self) -> _Nothing:
        return _Nothing(self._policy)

    def get_library_path(self) -> str:
        return ""

    def get_library_paths(self) -> tuple[str, ...]:
        return ()


def patch_flashinfer(policy: Policy, module: ModuleType) -> None:
    """Patch `flashinfer.jit`: functions that describe a module of kernels, and what builds and loads it.

    Where a description needs files that FlashInfer would load from the network, none is made.
    """
    loader: Any = module.cubin_loader

    def build_and_load(_spec: Any, *_args: Any, **_kwargs: Any) -> _Nothing:
        return _Nothing(policy)

    def do_nothing(*_args: Any, **_kwargs: Any) -> None:
        return None

    def without_files(describe: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(describe)
        def described(*args: Any, **kwargs: Any) -> Any:
            download = getattr(loader, "download_file", None)
            loader.download_file = do_nothing
            try:
                return describe(*args, **kwargs)
            except (AssertionError, RuntimeError, OSError):
                return _Undescribed(policy)
            finally:
                loader.download_file = download

        return described

    module.core.JitSpec.build_and_load = build_and_load
    for name, part in list(sys.modules.items()):
        if not f"{name}.".startswith(f"{module.__name__}."):
            continue
        for function, value in list(vars(part).items()):
            if function == "setup_cubin_loader":
                setattr(part, function, do_nothing)
            elif function.startswith("gen_") and function.endswith("_module") and callable(value):
                setattr(part, function, without_files(value))


def patch_sglang(policy: Policy, module: ModuleType) -> None:
    """Patch `sglang.kernels.jit.utils.compile.loader`, whose `load_jit` is what modules import from its package."""

    def load_jit(*_names: str, **_options: Any) -> _Nothing:
        return _Nothing(policy)

    vars(module)["load_jit"] = load_jit


def patch_cutlass(policy: Policy, module: ModuleType) -> None:
    """Patch `cutlass.base_dsl.compiler`, whose `CompileCallable` is `cute.compile`."""

    def compile_nothing(_self: Any, *_args: Any, **_kwargs: Any) -> _Nothing:
        return _Nothing(policy)

    module.CompileCallable.__call__ = compile_nothing
