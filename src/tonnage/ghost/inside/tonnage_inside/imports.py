"""Do something right after a module has been imported, whoever imports it and whenever."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


class _Loader(importlib.abc.Loader):
    """The real loader, and the actions after it, in the order in which they were asked for."""

    def __init__(self, loader: Any, actions: Sequence[Action]) -> None:
        self._loader, self._actions = loader, actions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for action in self._actions:
            action(module)


class _Finder(importlib.abc.MetaPathFinder):
    """First on sys.meta_path; answers only for the watched names, each once."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        actions = self.actions.pop(name, None)
        if actions is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, actions)
        return spec


_finder = _Finder()


def after_import(name: str, action: Action) -> None:
    """Call `action(module)` once `name` is imported: now, if it already is."""
    if name in sys.modules:
        action(sys.modules[name])
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.actions.setdefault(name, []).append(action)
