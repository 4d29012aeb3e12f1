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
    """The real loader, and what is to be done after it."""

    def __init__(self, loader: Any, loaded: Action) -> None:
        self._loader, self._loaded = loader, loaded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._loaded(module)


class _Finder(importlib.abc.MetaPathFinder):
    """First on sys.meta_path; answers only for the watched names, until they are imported.

    Being asked is not being imported: many packages look for torch with `importlib.util.find_spec` first.
    """

    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}
        self._asking: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.actions or name in self._asking:
            return None
        self._asking.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking.remove(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._act)
        return spec

    def _act(self, module: ModuleType) -> None:
        """What was asked for, in that order, once."""
        for action in self.actions.pop(module.__name__, ()):
            action(module)


_finder = _Finder()


def expect(*names: str) -> None:
    """Modules for which actions may be asked for while they are being imported: they act when they are whole."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    for name in names:
        if name not in sys.modules:
            _finder.actions.setdefault(name, [])


def after_import(name: str, action: Action) -> None:
    """Call `action(module)` once `name` is imported: now, if it already is."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        action(module)
        return
    expect(name)
    _finder.actions.setdefault(name, []).append(action)
