"""Forgets what Triton kernels write, as their intermediate code tells.

tt.store %sums_5, ...  and  %sums_5 = tt.addptr %sums, ...  and  %sums = tt.splat %total    ->    `total` is written
"""

from __future__ import annotations

import functools
import re
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .integers import is_small

if TYPE_CHECKING:
    from .policy import Policy

_WRITE = re.compile(r"tt\.(?:store|descriptor_store|atomic_rmw|atomic_cas)\b[^%\n]*%([\w]+)")
_RESULT = re.compile(r"^\s*%(\w+)(?::\d+)? = (.*)$", re.MULTILINE)
_CARRIED = re.compile(r"%(\w+) = %(\w+)")
"""A name inside a loop and where its first value comes from."""
_NAME = re.compile(r"%(\w+)")


def patch(policy: Policy, module: ModuleType) -> None:
    """Patch `triton.runtime.jit`."""
    kind = module.JITFunction  # type: ignore[attr-defined]
    original = kind.run

    @functools.wraps(original)
    def run(function: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = original(function, *args, **kwargs)
        given = {**dict(zip(function.arg_names, args, strict=False)), **kwargs}
        with policy.torch._C.DisableTorchFunction():
            small = {name: each for name, each in given.items() if is_small(policy.torch, each, numbers=True)}
            if small:
                code = getattr(kernel, "asm", {}).get("ttir")
                for name in small if code is None else written_names(str(code)) & small.keys():
                    policy.forget(small[name])
        return kernel

    kind.run = run


@functools.lru_cache
def written_names(code: str) -> frozenset[str]:
    """Return the names in a kernel's code, arguments included, from which the addresses that it writes follow."""
    sources: dict[str, set[str]] = {}
    for name, expression in _RESULT.findall(code):
        sources.setdefault(name, set()).update(_NAME.findall(expression))
    for name, source in _CARRIED.findall(code):
        sources.setdefault(name, set()).add(source)
    found, waiting = set(), set(_WRITE.findall(code))
    while waiting:
        name = waiting.pop()
        found.add(name)
        waiting |= sources.get(name, set()) - found
    return frozenset(found)
