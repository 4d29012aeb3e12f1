"""A network as it was before a plan was applied: its modules' classes, attributes and hooks, and its configuration.

Techniques replace forwards, add hooks, wrap modules and set switches.  Nothing of that needs to be undone one by one:
what every module held is noted beforehand and put back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import nn
from torch.distributed import _composable_state

_HOOKS: Final = "_post_accumulate_grad_hooks"


class Snapshot:
    """Everything that a network's modules, parameters and configurations hold, except the values of weights."""

    def __init__(self, network: nn.Module) -> None:
        self.modules = [(module, type(module), _copy(vars(module))) for module in network.modules()]
        self.parameters = [(p, p.requires_grad, set(getattr(p, _HOOKS) or ())) for p in network.parameters()]
        self.configurations = [(config, dict(vars(config))) for config in _configurations(network)]

    def restore(self) -> None:
        """Put everything back."""
        for module, kind, attributes in self.modules:
            module.__class__ = kind
            held = vars(module)
            held.clear()
            for name, (value, content) in attributes.items():
                held[name] = value
                if content is not None:
                    value.clear()
                    value.update(content)
            _composable_state._module_state_mapping.pop(module, None)  # that of FSDP2
        for parameter, requires_grad, hooks in self.parameters:
            parameter.requires_grad_(requires_grad)
            present = getattr(parameter, _HOOKS)
            for key in set(present or ()) - hooks:
                del present[key]
        _set_all(self.configurations)

    @contextmanager
    def with_configuration(self) -> Iterator[None]:
        """Put the configurations back for a while: to save them as the user made them."""
        now = [(config, dict(vars(config))) for config, _ in self.configurations]
        _set_all(self.configurations)
        try:
            yield
        finally:
            _set_all(now)


@contextmanager
def with_variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable inside, unless the user has: processes that are started later do not get it."""
    is_missing = name not in os.environ
    os.environ.setdefault(name, value)
    try:
        yield
    finally:
        if is_missing:
            os.environ.pop(name, None)


def _copy(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return each attribute, and the content of those that are dicts or sets: parameters, modules, hooks."""
    return {
        name: (value, value.copy() if isinstance(value, dict | set) else None) for name, value in attributes.items()
    }


def _configurations(network: nn.Module) -> list[Any]:
    """Return the configuration objects of transformers that the modules refer to, each once."""
    from transformers import GenerationConfig, PretrainedConfig

    kinds = (PretrainedConfig, GenerationConfig)
    held = [value for module in network.modules() for value in vars(module).values() if isinstance(value, kinds)]
    found = {id(config): config for config in held}
    for config in held:
        inner = (getattr(config, name, None) for name in getattr(config, "sub_configs", {}))
        found |= {id(part): part for part in inner if part is not None}
    return list(found.values())


def _set_all(configurations: list[tuple[Any, dict[str, Any]]]) -> None:
    for config, attributes in configurations:
        vars(config).clear()
        vars(config).update(attributes)
