"""Docstrings say what something is or does: none begins with What, Whether or Of.

A docstring is also a string after an assignment, which documents a constant or a field.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "tonnage"

ROOMS = sorted(path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file())
"""Files and folders of the package: all are checked."""

FORBIDDEN = ("What ", "Whether ", "Of ")

EXAMPLE = '''"""What a module is for."""
LIMIT = 1
"""Of what it is the limit."""


class Plan:
    """Whether it is a class."""

    fits: bool = True
    """Whether it fits."""

    def run(self):
        """What it does."""
        text = "What is this"
        return text


async def wait():
    """Wait for whatever is asked. What that is, is said here."""
'''


def find_docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring of a module, its definitions and its assignments."""
    for node in ast.walk(ast.parse(source)):
        for body in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            for index, statement in enumerate(body if isinstance(body, list) else []):
                is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
                if not is_text or not isinstance(statement.value.value, str):
                    continue
                follows_assignment = index > 0 and isinstance(body[index - 1], ast.Assign | ast.AnnAssign)
                has_docstring = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                if follows_assignment or (index == 0 and has_docstring):
                    yield statement.lineno, statement.value.value


def find_forbidden(source: str) -> list[tuple[int, str]]:
    """Return the line and the first line of each docstring that begins with a forbidden word."""
    return sorted(
        (line, text.strip().splitlines()[0])
        for line, text in find_docstrings(source)
        if text.lstrip().startswith(FORBIDDEN)
    )


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_begin_with_a_statement(room: str) -> None:
    path = PACKAGE / room
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    assert files, f"{room} has no Python files"
    forbidden = [
        f"{file.relative_to(PACKAGE.parent)}:{line}: {text}"
        for file in files
        for line, text in find_forbidden(file.read_text(encoding="utf-8"))
    ]
    assert not forbidden, "\n".join(forbidden)


def test_docstrings_of_all_kinds_are_found() -> None:
    assert [line for line, _ in find_forbidden(EXAMPLE)] == [1, 3, 7, 10, 13]
