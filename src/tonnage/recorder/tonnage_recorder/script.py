"""Facts about a script that trains: network, adapters, trainer and its arguments, batches, command line.

They are noted from the objects as they are built, never from the source.  `TONNAGE_SETTINGS`, a JSON object, puts
values into TrainingArguments or into the arguments of an Accelerator, as a user would who follows a suggestion.
"""

import argparse
import functools
import inspect
import json
import math
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .imports import after_import
from .tensors import elements

_LOOPS = ("mixed_precision", "gradient_accumulation_steps")
"""Arguments that a user's own loop passes to an Accelerator."""


class Script:
    """The facts of one process, in `facts`: plain values that JSON can hold."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self._largest = 0
        self.settings: dict[str, Any] = json.loads(os.environ.get("TONNAGE_SETTINGS", "{}"))

    def listen(self) -> None:
        """Note facts from now on, whoever imports the libraries and whenever."""
        self._hear_parsers()
        after_import("transformers.training_args", self._hear_arguments)
        after_import("transformers.trainer", self._hear_trainer)
        after_import("accelerate.accelerator", self._hear_accelerator)
        after_import("tonnage.train.setup", self._hear_run)

    def _hear_parsers(self) -> None:
        """Note the command-line options of every parser that reads this process's arguments."""

        def parsed(parser: Any, args: Any = None, *_: Any, **__: Any) -> None:
            known = self.facts.setdefault("options", {})
            for action in parser._actions:
                for name in action.option_strings:
                    default = action.default if isinstance(action.default, bool | int | str) else None
                    known[name] = {
                        **{"dest": action.dest, "action": _kind(action), "nargs": action.nargs},
                        "default": default,
                    }

        _before(argparse.ArgumentParser, "parse_known_args", self._safely(parsed))
        for module in ("click.core", "typer._click.core"):
            after_import(module, self._hear_click)

    def _hear_click(self, module: ModuleType) -> None:
        def parsed(command: Any, *_: Any, **__: Any) -> None:
            known = self.facts.setdefault("options", {})
            for option in command.params:
                default = option.default if isinstance(option.default, bool | int | str) else None
                kind = "storetrue" if getattr(option, "is_flag", False) else "store"
                for name in option.opts if option.param_type_name == "option" else ():
                    known[name] = {"dest": option.name, "action": kind, "nargs": None, "default": default}

        _before(module.Command, "parse_args", self._safely(parsed))

    def _hear_arguments(self, module: ModuleType) -> None:
        def made(arguments: Any) -> None:
            for name, value in self.settings.items():
                if hasattr(arguments, name):
                    setattr(arguments, name, value)

        _before(module.TrainingArguments, "__post_init__", self._safely(made))

    def _hear_trainer(self, module: ModuleType) -> None:
        kind = module.Trainer
        signature = inspect.signature(kind.__init__)

        def begun(trainer: Any, *args: Any, **kwargs: Any) -> None:
            given = signature.bind_partial(trainer, *args, **kwargs).arguments
            self._note_trainer(trainer, given.get("args"))
            self._note_network(given.get("model"))

        def built(trainer: Any, *_: Any, **__: Any) -> None:
            self._note_trainer(trainer, trainer.args)
            self._note_network(trainer.model)
            self._note_accelerator(trainer.accelerator)

        def stepped(trainer: Any, model: Any, inputs: Any, *_: Any, **__: Any) -> None:
            self.note_batch(inputs)

        _before(kind, "__init__", self._safely(begun))
        _after(kind, "__init__", self._safely(built))
        _before(kind, "training_step", self._safely(stepped))

    def _hear_accelerator(self, module: ModuleType) -> None:
        parameters = inspect.signature(module.Accelerator.__init__)

        def begun(*args: Any, **kwargs: Any) -> None:
            given = parameters.bind(*args, **kwargs).arguments
            self.facts["given"] = [name for name in _LOOPS if given.get(name) is not None]

        def built(accelerator: Any, *_: Any, **__: Any) -> None:
            self._note_accelerator(accelerator)

        def prepared(accelerator: Any, *things: Any, **__: Any) -> None:
            for thing in things:
                if hasattr(thing, "named_parameters") and hasattr(thing, "forward"):
                    self._checkpoint(thing)
                    self._note_network(thing)
                    _with_words(thing, self._safely(self.note_batch))
                elif hasattr(thing, "param_groups"):
                    self._fuse(thing)
                    self.facts["optimizer"] = _optimizer(thing)

        _given(module.Accelerator, _LOOPS, self._of_a_loop())
        _before(module.Accelerator, "__init__", self._safely(begun))
        _after(module.Accelerator, "__init__", self._safely(built))
        _before(module.Accelerator, "prepare", self._safely(prepared))

    def _hear_run(self, module: ModuleType) -> None:
        """Note job, plan and network of `tonnage train`, whose step is that of the plan's estimate."""
        prepare = module.prepare

        @functools.wraps(prepare)
        def heard(*args: Any, **kwargs: Any) -> Any:
            setup = prepare(*args, **kwargs)
            self.facts["planned"] = {
                "job": plain(vars(setup.job) | {"model": None}),
                "plan": plain(vars(setup.plan)),
                "config": plain(setup.source.config),
            }
            return setup

        module.prepare = heard  # type: ignore[attr-defined]

    def _of_a_loop(self) -> dict[str, Any]:
        """Return the settings for a loop with an Accelerator; a Trainer's have other names or are its arguments."""
        return self.settings if self.settings.get("of") == "loop" else {}

    def _checkpoint(self, model: Any) -> None:
        if self._of_a_loop().get("gradient_checkpointing") is True:
            model.gradient_checkpointing_enable()
        elif self._of_a_loop().get("gradient_checkpointing") is False:
            model.gradient_checkpointing_disable()

    def _fuse(self, optimizer: Any) -> None:
        if self._of_a_loop().get("fused"):
            for group in (optimizer.defaults, *optimizer.param_groups):
                group.update(fused=True, foreach=False)

    def _note_trainer(self, trainer: Any, arguments: Any) -> None:
        kinds = type(trainer).__mro__[:-1]
        self.facts["trainer"] = [f"{kind.__module__}.{kind.__name__}" for kind in kinds]
        if arguments is not None:
            self.facts["arguments"] = {"class": type(arguments).__name__, "values": plain(arguments.to_dict())}
            self.facts["processes"] = arguments.world_size
            self.facts["cards_of_process"] = arguments.n_gpu

    def _note_network(self, model: Any) -> None:
        found = network(model)
        if found is not None:
            self.facts["network"] = found

    def _note_accelerator(self, accelerator: Any) -> None:
        plugin = getattr(accelerator.state, "fsdp_plugin", None)
        self.facts["accelerator"] = {
            "distributed": accelerator.distributed_type.value,
            "mixed_precision": accelerator.mixed_precision,
            "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
            "processes": accelerator.num_processes,
            "fsdp": None if plugin is None else _sharding(plugin),
            "given": self.facts.pop("given", []),
        }

    def note_batch(self, inputs: Any) -> None:
        """Note the shape of one micro-batch; the largest one is kept."""
        words = getattr(inputs, "get", lambda name: None)("input_ids")
        shape = tuple(getattr(words, "shape", ()))
        if len(shape) != 2:
            return
        batch = self.facts.setdefault("batch", {"sequences": 0, "tokens": 0, "least_tokens": int(shape[1])})
        batch["sequences"] = max(batch["sequences"], int(shape[0]))
        batch["tokens"] = max(batch["tokens"], int(shape[1]))
        batch["least_tokens"] = min(batch["least_tokens"], int(shape[1]))

    def meet(self, root: Any, given: tuple[Any, ...]) -> None:
        """Note a module that is called from outside any other: without a trainer, the largest is the network.

        `given`: the arguments of its first call that have no names.
        """
        self._safely(self._meet)(root, given)

    def _meet(self, root: Any, given: tuple[Any, ...]) -> None:
        if "trainer" in self.facts or "accelerator" in self.facts:
            return
        found = network(root)
        if found is not None and _elements(found) >= _elements(self.facts.get("network", _NOTHING)):
            self.facts["network"] = found
        size = sum(elements(parameter) for parameter in root.parameters())
        if size >= self._largest:
            self._largest = size
            self._note_rows(given)
            if found is not None and not given:
                _with_first_input(root, self._safely(self._note_rows))

    def _note_rows(self, given: tuple[Any, ...]) -> None:
        """Note the rows of the first tensor, and the tokens of a row of words."""
        first = next((one for one in given if len(getattr(one, "shape", ())) > 1), None)
        if first is not None:
            self.facts["rows"] = int(first.shape[0])
            if not first.is_floating_point():
                self.note_batch({"input_ids": first})

    def _safely(self, hear: Callable[..., None]) -> Callable[..., None]:
        """Return a listener whose errors are noted in `missed`, so that the script runs as it does alone."""

        def heard(*args: Any, **kwargs: Any) -> None:
            try:
                hear(*args, **kwargs)
            except Exception as error:
                missed = f"{hear.__name__}: {type(error).__name__}: {error}".splitlines()[0]
                if missed not in self.facts.setdefault("missed", []):
                    self.facts["missed"].append(missed)

        return heard


def network(model: Any) -> dict[str, Any] | None:
    """Return class, configuration, dtypes, adapters and quantization of a transformers network; else None."""
    while type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
        model = model.module
    adapters = getattr(model, "peft_config", None) if hasattr(model, "get_base_model") else None
    base = model.get_base_model() if adapters else model
    config: Any = getattr(base, "config", None)
    if not hasattr(config, "to_dict") or not hasattr(base, "named_parameters"):
        return None

    trainable: dict[str, int] = {}
    frozen: dict[str, int] = {}
    for parameter in model.parameters():
        counts = trainable if parameter.requires_grad else frozen
        name = str(parameter.dtype).removeprefix("torch.")
        counts[name] = counts.get(name, 0) + elements(parameter)
    return {
        "class": type(base).__name__,
        "config": plain(config.to_dict()),
        "attention": getattr(config, "_attn_implementation", None),
        "trainable": trainable,
        "frozen": frozen,
        "checkpointed": _is_checkpointed(base),
        "adapters": plain(next(iter(adapters.values())).to_dict()) if adapters else None,
    }


def _is_checkpointed(model: Any) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


_NOTHING: dict[str, Any] = {"trainable": {}, "frozen": {}}


def _elements(found: dict[str, Any]) -> int:
    elements: int = sum(found["trainable"].values()) + sum(found["frozen"].values())
    return elements


def _optimizer(optimizer: Any) -> dict[str, Any]:
    defaults = optimizer.defaults
    kind = type(optimizer)
    return {
        "class": f"{kind.__module__}.{kind.__name__}",
        "fused": bool(defaults.get("fused")),
        "foreach": defaults.get("foreach"),
    }


def _sharding(plugin: Any) -> dict[str, Any]:
    return {
        "version": getattr(plugin, "fsdp_version", 1),
        "reshard_after_forward": plain(plugin.reshard_after_forward),
        "offload": bool(getattr(plugin.cpu_offload, "offload_params", plugin.cpu_offload)),
        "activation_checkpointing": bool(plugin.activation_checkpointing),
    }


def _with_words(module: Any, hear: Callable[[Any], None]) -> None:
    """Call `hear` with the keyword arguments of each call of a module."""

    def called(_module: Any, _args: Any, kwargs: Any) -> None:
        hear(kwargs)

    module.register_forward_pre_hook(called, with_kwargs=True)


def _with_first_input(root: Any, hear: Callable[[Any], None]) -> None:
    """Call `hear` with what comes first to the embedding of a network of transformers, and leave no hook in it.

    Compiled code is left alone: it would be compiled with the hook.
    """
    modules = list(root.modules())
    if any(hasattr(one, "_orig_mod") or one._compiled_call_impl is not None for one in modules):
        return
    network = next(one for one in modules if hasattr(one, "get_input_embeddings"))
    embedding = network.get_input_embeddings()

    def called(_module: Any, given: Any) -> None:
        handle.remove()
        hear(given)

    handle = embedding.register_forward_pre_hook(called)


def _before(kind: Any, name: str, hear: Callable[..., None]) -> None:
    original = getattr(kind, name)

    @functools.wraps(original)
    def heard(*args: Any, **kwargs: Any) -> Any:
        hear(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(kind, name, heard)


def _after(kind: Any, name: str, hear: Callable[..., None]) -> None:
    original = getattr(kind, name)

    @functools.wraps(original)
    def heard(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        hear(*args, **kwargs)
        return result

    setattr(kind, name, heard)


def _given(kind: Any, names: tuple[str, ...], settings: dict[str, Any]) -> None:
    """Replace arguments of a class's constructor by these settings."""
    wanted = {name: settings[name] for name in names if name in settings}
    original = kind.__init__
    if wanted:
        kind.__init__ = functools.wraps(original)(lambda *args, **kwargs: original(*args, **{**kwargs, **wanted}))


def _kind(action: argparse.Action) -> str:
    """Return `store`, `store_true`, ... for argparse's own classes, and the name of any other class."""
    return type(action).__name__.removeprefix("_").removesuffix("Action").lower()


def plain(value: Any) -> Any:
    """Return a value as JSON holds it: sets as lists, infinities as transformers writes them, others as text."""
    if isinstance(value, dict):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, set | frozenset):
        return sorted(plain(inner) for inner in value)
    if isinstance(value, float) and math.isinf(value):
        return {"__float__": "Infinity" if value > 0 else "-Infinity"}
    if value is None or isinstance(value, bool | int | float | str):
        return getattr(value, "value", value)
    return str(getattr(value, "value", value)).removeprefix("torch.")
