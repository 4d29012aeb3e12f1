"""The packages that are installed, and the fields of their dataclasses; no package is imported."""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path


def find_version(package: str) -> str | None:
    """Return the version of a distribution, None where it is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # a tenth of a second that --help need not pay

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def missing(packages: tuple[str, ...]) -> list[str]:
    """Return those of these distributions that are not installed."""
    return [package for package in packages if find_version(package) is None]


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of those of these distributions that are installed."""
    return {package: version for package in packages if (version := find_version(package)) is not None}


@cache
def fields(package: str, file: str, name: str) -> frozenset[str]:
    """Return the fields of a dataclass, read from its source.

    `file` is the path within the package.  The answer is empty where the package or the class is not there.
    """
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        source = Path(folder) / file
        if source.is_file():
            return _annotated_names(source, name)
    return frozenset()


def _annotated_names(source: Path, class_name: str) -> frozenset[str]:
    tree = ast.parse(source.read_text(encoding="utf-8"))
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    return frozenset(
        line.target.id
        for node in classes
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    )
