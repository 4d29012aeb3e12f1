"""The order of rooms: each imports only from those listed before it, wherever in a file the import stands."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tonnage

PACKAGE = Path(tonnage.__file__).parent

ROOMS = (
    *("printable", "errors", "units", "synonyms", "options", "files"),
    *("model", "job", "plans", "cluster", "catalog", "mesh", "case"),
    *("recorder", "trace", "allocator", "timing", "step", "techniques", "shallow"),
    *("ghost", "trainers", "workers", "meta", "estimates", "serving"),
    *("planner", "advice", "train", "integrations", "script", "tuning", "report", "api", "cli", "__main__"),
)
"""From the ground up; docs/explanation/architecture.md says what each is for."""

APART = (PACKAGE / "recorder", PACKAGE / "ghost" / "inside")
"""Code that runs beside torch in processes that may not have tonnage: it imports nothing of it."""


def imported(file: Path) -> Iterator[tuple[str, int]]:
    """Yield the room that each import of a file names, with its line."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tonnage":
            names = (node.module or "").split(".")[1:2] or [alias.name for alias in node.names]
            yield from ((name, node.lineno) for name in names if name != "__version__")
        elif isinstance(node, ast.Import):
            found = (alias.name.split(".") for alias in node.names)
            yield from ((parts[1], node.lineno) for parts in found if parts[0] == "tonnage" and parts[1:])


def files() -> list[Path]:
    return [file for file in PACKAGE.rglob("*.py") if not file.is_relative_to(APART[1])]


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def test_every_room_is_listed():
    assert {room_of(file) for file in files()} - {"__init__"} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_from_those_before_it(room: str):
    upwards = [
        f"{file.relative_to(PACKAGE)}:{line} imports {other}"
        for file in files()
        if room_of(file) == room
        for other, line in imported(file)
        if ROOMS.index(other) > ROOMS.index(room)
    ]
    assert upwards == []


@pytest.mark.parametrize("folder", APART, ids=lambda folder: folder.name)
def test_what_runs_beside_torch_alone_imports_nothing_of_tonnage(folder: Path):
    assert [str(file) for file in folder.rglob("*.py") if any(imported(file))] == []


def test_the_root_holds_a_dozen_files():
    assert len(list(PACKAGE.glob("*.py"))) <= 15


def test_no_module_has_the_name_of_a_public_function():
    """Python sets an imported module as an attribute of the package, where it would replace the function."""
    functions = {name for name in tonnage.__all__ if name.islower()}
    assert functions & {path.stem for path in PACKAGE.iterdir()} == set()


PAGE = (Path(__file__).parents[1] / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")


def named_files() -> Iterator[tuple[str, Path]]:
    """Yield the files that the tables of the architecture page name, each with the folder of its row.

    That is the folder of the row's room, or of the first path in the row.
    """
    tables = PAGE[PAGE.index("| room | what it is for") : PAGE.index("## Interfaces")]
    for row in (line for line in tables.splitlines() if line.startswith("| ")):
        names = re.findall(r"`([\w/]+\.(?:py|toml|h))`", row)
        room = re.match(r"\| `(\w+/)`", row)
        folder = PACKAGE / room[1] if room else (PACKAGE / names[0]).parent if names else PACKAGE
        yield from ((name, folder) for name in names)


def test_the_architecture_page_names_files_that_exist():
    named = list(named_files())
    assert len(named) > 30
    assert [name for name, folder in named if not ((PACKAGE / name).is_file() or (folder / name).is_file())] == []


def test_the_architecture_page_lists_the_rooms_in_their_order():
    table = PAGE[PAGE.index("| room | what it is for") : PAGE.index("## One question")]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert re.findall(r"`(\w+)/?`", " ".join(rows)) == list(ROOMS)
