"""Names what a program does beside its steps: it generates, saves, merges adapters, or asks a reference network.

The calls are known by name; within one of them, whatever runs belongs to its phase (`Marks.set_event`).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from .imports import after_import
from .marks import Marks

_METHODS = (
    ("transformers.generation.utils", "GenerationMixin", ("generate",), "generate"),
    ("transformers.modeling_utils", "PreTrainedModel", ("save_pretrained",), "save"),
    ("transformers.trainer", "Trainer", ("save_model", "_save_checkpoint"), "save"),
    ("peft.peft_model", "PeftModel", ("save_pretrained",), "save"),
    ("peft.tuners.tuners_utils", "BaseTuner", ("merge_and_unload", "merge_adapter"), "merge"),
    (
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel",
        ("state_dict", "optim_state_dict", "full_optim_state_dict", "sharded_optim_state_dict"),
        "save",
    ),
    ("diffusers.models.modeling_utils", "ModelMixin", ("save_pretrained",), "save"),
    ("accelerate.accelerator", "Accelerator", ("get_state_dict", "save_state", "save_model"), "save"),
    (
        "deepspeed.runtime.engine",
        "DeepSpeedEngine",
        ("save_checkpoint", "save_16bit_model", "_zero3_consolidated_16bit_state_dict"),
        "save",
    ),
)
"""Module, class, methods and phase."""

_FUNCTIONS = (
    ("torch.serialization", "torch", ("save",)),
    (
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.checkpoint.state_dict",
        ("get_state_dict", "get_model_state_dict", "get_optimizer_state_dict"),
    ),
    ("torch.distributed.checkpoint.state_dict_saver", "torch.distributed.checkpoint", ("save", "async_save")),
)
"""Modules with functions that save, and those that show them too."""


class Phases:
    """The phases of one process that are known by calls."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._active = ""

    def hook(self) -> None:
        """Follow the calls from now on."""
        for module, kind, names, phase in _METHODS:
            after_import(module, functools.partial(self._wrap_methods, kind, names, phase))
        for module, shown, names in _FUNCTIONS:
            after_import(module, functools.partial(self._wrap_functions, shown, names))
        after_import("peft.peft_model", self._wrap_adapters)

    def _wrap_methods(self, kind: str, names: tuple[str, ...], phase: str, module: ModuleType) -> None:
        owner = getattr(module, kind)
        for name in names:
            if hasattr(owner, name):
                setattr(owner, name, self._in_phase(phase, getattr(owner, name)))

    def _wrap_functions(self, shown: str, names: tuple[str, ...], module: ModuleType) -> None:
        for name in names:
            if hasattr(module, name):
                original = getattr(module, name)
                wrapped = self._in_phase("save", original)
                setattr(module, name, wrapped)
                after_import(shown, functools.partial(_show, name, original, wrapped))

    def _wrap_adapters(self, module: ModuleType) -> None:
        """Take a pass without adapters for one of the reference network, as preference trainers make it."""
        kind = module.PeftModel
        original = kind.disable_adapter

        @contextlib.contextmanager
        def disable_adapter(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with self._phase("reference"), original(*args, **kwargs) as result:
                yield result

        kind.disable_adapter = functools.wraps(original)(disable_adapter)

    def _in_phase(self, phase: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._phase(phase):
                return original(*args, **kwargs)

        return call

    @contextlib.contextmanager
    def _phase(self, phase: str) -> Iterator[None]:
        """Assign what happens inside to a phase, unless it is part of another one.

        A program that has not trained yet goes on loading afterwards.
        """
        if self._active:
            yield
            return
        self._active = phase
        is_loading = self._marks.rows[-1][1] == "load"
        self._marks.set_event(phase)
        try:
            yield
        finally:
            self._active = ""
            self._marks.set_event("")
            if is_loading:
                self._marks.mark("load", "")


def _show(name: str, original: Any, wrapped: Any, module: ModuleType) -> None:
    """Replace a function where another module shows it."""
    if getattr(module, name, None) is original:
        setattr(module, name, wrapped)
