"""Replaced functions of torch where they are looked up by identity: in TorchScript and by pickle."""

import inspect
from types import FunctionType
from typing import Any


def keep(torch: Any) -> None:
    """Register replaced functions as torch's own, so that TorchScript compiles those and pickle names them."""
    builtins, written_in_python = torch.jit._builtins, torch._jit_internal.boolean_dispatched
    owners = (torch, torch.nn.functional)
    functions = [
        (owner, value) for owner in owners for value in vars(owner).values() if isinstance(value, FunctionType)
    ]
    for owner, function in functions:
        if function.__globals__["__package__"] != __package__:
            continue
        original = inspect.unwrap(function)
        function.__module__, function.__qualname__ = owner.__name__, function.__name__
        operation = builtins._find_builtin(original)
        if operation is not None:
            builtins._register_builtin(function, operation)
        if original in written_in_python:
            written_in_python[function] = written_in_python[original]
