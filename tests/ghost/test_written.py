"""What is written inside a ghost's process and what reads it outside agree; neither can import the other."""

import importlib.util
from pathlib import Path
from types import ModuleType

from tonnage import trace
from tonnage.ghost.process import INSIDE


def inside(name: str) -> ModuleType:
    """A module of tonnage_inside, loaded from its file."""
    spec = importlib.util.spec_from_file_location(name, Path(INSIDE) / "tonnage_inside" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_events_have_the_same_codes() -> None:
    assert inside("written").ACTIONS == {name: code for code, name in enumerate(trace.ACTIONS)}


def test_files_have_the_same_version() -> None:
    assert inside("written").FORMAT_VERSION == trace.FORMAT_VERSION
