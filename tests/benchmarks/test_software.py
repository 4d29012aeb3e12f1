"""The software of the day that published rows are run with: named, found, got whole or not at all."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.accuracy import software
from benchmarks.accuracy.rows import Row, load

from tonnage.ghost.wheel import Torch


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where software lies in this test; torch is the installed one, without looking for it."""
    monkeypatch.setenv("TONNAGE_CACHE", str(tmp_path))
    monkeypatch.setattr(software, "find", lambda python, version=None: torch(version or "installed"))
    monkeypatch.setattr(software, "find_in_folder", lambda folder, python: torch(folder.name))
    return tmp_path / "software"


def torch(version: str) -> Torch:
    return Torch(version=version, cuda_major=13, path=None, python="python")


def repository(folder: Path, **files: str) -> str:
    """A git repository with one commit, whose name is returned."""
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    folder.mkdir()
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "config", "uploadpack.allowAnySHA1InWant", "true"], check=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "first"], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


def test_every_name_that_a_row_gives_is_known_and_every_known_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    ladders = importlib.import_module("ladders")
    for name in ("ladders", "asking"):
        sys.modules.pop(name, None)
    assert {name for row in load() for name in row.software} | set(ladders.SOFTWARE) == set(software.RECIPES)


def test_rows_with_other_software_are_other_jobs() -> None:
    row = next(row for row in load() if row.software)
    assert Row(**{**vars_of(row), "software": ()}).job != row.job


def vars_of(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in Row.__dataclass_fields__}


def test_libraries_come_first_repositories_are_told_of_and_torch_is_that_of_the_day(kept: Path) -> None:
    names = ["litgpt 41dece20", "lightning 2.5.5", "torch 2.4.1"]
    for name in names:
        (kept / name.replace(" ", "-")).mkdir(parents=True)
    given = software.given(names)
    assert given.paths == (str(kept / "lightning-2.5.5"),)
    assert given.variables == (("LITGPT", str(kept / "litgpt-41dece20")),)
    assert given.torch == torch("torch-2.4.1")
    assert software.given(names, "2.12.0").torch == torch("2.12.0")
    assert software.given([]).torch == torch("installed")
    assert software.given(["torch 2.10.0"]).torch == torch("2.10.0")


def test_what_is_not_here_says_how_it_comes(kept: Path) -> None:
    with pytest.raises(software.MissingSoftware, match=r"transformers 4\.46\.3 not here; python -m benchmarks"):
        software.given(["transformers 4.46.3"])
    with pytest.raises(software.MissingSoftware, match="has no 'transformers 3'; it has torch 2"):
        software.given(["transformers 3"])


def test_a_repository_comes_as_the_files_of_its_commit(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = repository(tmp_path / "project", program="print(1)")
    recipe = {"git": str(tmp_path / "project"), "commit": commit, "variable": "PROJECT", "touch": ["beside"]}
    monkeypatch.setitem(software.RECIPES, "project 1", recipe)
    assert software.main(["project 1"]) == 0
    assert (kept / "project-1" / "program").read_text() == "print(1)"
    assert (kept / "project-1" / "beside").exists()
    assert software.given(["project 1"]).variables == (("PROJECT", str(kept / "project-1")),)
    monkeypatch.setitem(recipe, "git", "nowhere")
    assert software.main(["project 1"]) == 0  # it is here


def test_what_cannot_be_got_leaves_nothing_and_says_why(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(software.RECIPES, "project 1", {"git": str(tmp_path / "nowhere"), "commit": "0" * 40})
    assert software.main(["project 1"]) == 1
    assert "error: project 1: git -C" in capsys.readouterr().err
    assert list(kept.iterdir()) == []
    monkeypatch.setenv("PATH", str(tmp_path))
    assert software.main(["project 1"]) == 1
    assert "error: project 1: git does not run: No such file" in capsys.readouterr().err
    assert software.main(["project 2"]) == 2
    assert "has no 'project 2'" in capsys.readouterr().err


def test_a_torch_that_ghosts_fetch_themselves_is_got_with_the_rest(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the first rows that name it would wait for half a gigabyte."""
    fetched: list[str] = []

    def fetch(python: str, version: str) -> Torch:
        fetched.append(version)
        software.place_of_torch(version, sys.version_info[:2]).mkdir(parents=True)
        return torch(version)

    monkeypatch.setattr(software, "find", fetch)
    monkeypatch.setattr(software, "RECIPES", {"torch 2.9.0": {"torch": "2.9.0"}})
    assert software.missing(["torch 2.9.0"]) == []  # whoever runs rows has it fetched if need be
    assert software.unfetched(["torch 2.9.0"]) == ["torch 2.9.0"]
    assert software.main(["torch 2.9.0"]) == 0
    assert software.main(["torch 2.9.0"]) == 0
    assert fetched == ["2.9.0"]
    assert capsys.readouterr().err == "getting torch 2.9.0\n"
