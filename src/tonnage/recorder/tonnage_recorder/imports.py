"""Call a function right after a module has been imported, whoever imports it and whenever, or when one is missing."""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


class _Loader(importlib.abc.Loader):
    """The real loader, and the function to call after it."""

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
        """Call the module's actions once, in the order in which they were added."""
        for action in self.actions.pop(module.__name__, ()):
            action(module)


class _Last(importlib.abc.MetaPathFinder):
    """Last on sys.meta_path: it is asked for modules that no other finder has."""

    def __init__(self, lacks: Callable[[str], None]) -> None:
        self._lacks = lacks

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if path is None and _is_the_programs(_asking_file()):
            self._lacks(name)


def _asking_file() -> str:
    """Return the file of the code that imports, or looks for, a module."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return "" if frame is None else str(frame.f_code.co_filename)


def _is_the_programs(file: str) -> bool:
    """Return whether a file is the program's own; libraries look for many modules that they can do without."""
    library = os.path.join(os.path.dirname(os.__file__), "")
    return not file.startswith(library) and not any(f"{os.sep}{name}{os.sep}" in file for name in _LIBRARIES)


_LIBRARIES = ("site-packages", "dist-packages", "torch", "functorch")
"""Folders of libraries; the last two are for a ghost's torch, which is the only one in its folder."""

_finder = _Finder()


def tell_missing(lacks: Callable[[str], None]) -> None:
    """Call `lacks(name)` when the program's own code imports or looks for a package that is missing."""
    sys.meta_path.append(_Last(lacks))


def expect(*names: str) -> None:
    """Watch for modules for which actions may be added during their import; these run when the import is complete."""
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
