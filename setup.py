"""Build hook: the ghost's libraries are compiled into the package; everything else is in pyproject.toml."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path(__file__).parent / "src" / "tonnage" / "ghost" / "native" / "build.py"


def native() -> ModuleType:
    """The package's own build module, without importing the package."""
    spec = importlib.util.spec_from_file_location("tonnage_native_build", NATIVE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class BuildWithGhost(build_py):
    """Compiles the libraries beside the sources, from where they are packed like other data."""

    def run(self) -> None:
        ghost = native()
        try:
            ghost.build()
        except (ghost.BuildError, OSError) as error:
            print(f"tonnage: installed without the ghost's libraries: {error}", file=sys.stderr)
        super().run()


class GhostDistribution(Distribution):
    """Belongs to this platform where the libraries are inside."""

    def has_ext_modules(self) -> bool:
        return bool(native().supported())


class WheelOfThisPlatform(bdist_wheel):
    """For any Python 3: the libraries are no extension modules."""

    def get_tag(self) -> tuple[str, str, str]:
        tag: Any = super().get_tag()
        return ("py3", "none", tag[2])


setup(cmdclass={"build_py": BuildWithGhost, "bdist_wheel": WheelOfThisPlatform}, distclass=GhostDistribution)
