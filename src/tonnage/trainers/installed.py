"""What an installed package calls things, read off its source: nothing of it is imported."""

import ast
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path


def missing(packages: tuple[str, ...]) -> list[str]:
    """Those of these distributions that are not installed."""
    return [package for package in packages if versions((package,)) == {}]


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """The versions of those of these distributions that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@cache
def fields(package: str, file: str, name: str) -> frozenset[str]:
    """The fields of a dataclass of a package, `file` within it; none where it is not installed or not there."""
    spec = find_spec(package)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        source = Path(place) / file
        if source.is_file():
            return _annotated(source, name)
    return frozenset()


def _annotated(source: Path, name: str) -> frozenset[str]:
    tree = ast.parse(source.read_text(encoding="utf-8"))
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return frozenset(
        line.target.id
        for node in classes
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    )
