"""The software of the day that rows are run with in place of what is installed, by the names that they give.

    python -m benchmarks.accuracy.software [NAME...]

gets what rows name (or these) into `$TONNAGE_CACHE/software`, once; `software.toml` says how.  Some of it is large,
and Transformer Engine takes g++ and some minutes; rows whose software is not there are listed as not run.  Other
torches that a ghost runs with are fetched besides: a run of the rows that lacks them would do it, and wait for them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.accuracy import transformer_engine
from benchmarks.accuracy.rows import load

from tonnage.errors import TonnageError
from tonnage.ghost.cache_folder import cache_folder
from tonnage.ghost.wheel import Torch, find, find_in_folder
from tonnage.ghost.wheel import place as place_of_torch

RECIPES: Final[dict[str, dict[str, Any]]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


class MissingSoftware(TonnageError):
    """It is not known, was not got, or could not be."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a process is started with."""

    torch: Torch
    """With which the ghost runs."""
    paths: tuple[str, ...] = ()
    """Before all others on PYTHONPATH."""
    variables: tuple[tuple[str, str], ...] = ()
    """Where scripts find a repository's files."""


def given(names: Sequence[str], torch: str | None = None) -> Given:
    """What the names stand for; `torch` is a version or a folder in place of theirs.

    Raises MissingSoftware, GhostUnavailable.
    """
    recipes = {name: _recipe(name) for name in names}
    if lacking := missing(names):
        raise MissingSoftware(f"{', '.join(lacking)} not here; python -m benchmarks.accuracy.software gets it")
    torches = [str(place(name)) if "pip" in how else how["torch"] for name, how in recipes.items() if "torch" in how]
    return Given(
        torch=_torch(torch or next(iter(torches), None)),
        paths=tuple(str(place(name)) for name, how in recipes.items() if "pip" in how and "torch" not in how),
        variables=tuple((how["variable"], str(place(name))) for name, how in recipes.items() if "variable" in how),
    )


def place(name: str) -> Path:
    """The folder of a name."""
    return cache_folder() / "software" / name.replace(" ", "-")


def get(name: str) -> None:
    """Bring it here.  Raises MissingSoftware in the words of who could not, GhostUnavailable for a torch alone."""
    recipe = _recipe(name)
    if _is_fetched(recipe):
        find(sys.executable, recipe["torch"])
        return
    with _new(place(name)) as folder:
        if "git" in recipe:
            _run("git", "init", "--quiet", str(folder))
            _run("git", "-C", str(folder), "fetch", "--quiet", "--depth", "1", recipe["git"], recipe["commit"])
            _run("git", "-C", str(folder), "checkout", "--quiet", "FETCH_HEAD")
        if "pip" in recipe:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
            _run(*pip, *recipe["pip"], cwd=folder)
        if "engine" in recipe:
            transformer_engine.compile_into(folder, recipe["engine"], find(sys.executable), _run)
        for path in recipe.get("touch", ()):
            (folder / path).touch()


def missing(names: Sequence[str]) -> list[str]:
    """Those of them that have to be got."""
    return [name for name in names if not place(name).is_dir() and _recipe(name).keys() & {"pip", "git"}]


def unfetched(names: Sequence[str]) -> list[str]:
    """Those of them that are a torch which tonnage fetches itself when it is needed, and has not."""
    recipes = {name: _recipe(name) for name in names}
    return [
        name
        for name, recipe in recipes.items()
        if _is_fetched(recipe) and not place_of_torch(recipe["torch"], sys.version_info[:2]).is_dir()
    ]


def _is_fetched(recipe: dict[str, Any]) -> bool:
    return "torch" in recipe and "pip" not in recipe


def _recipe(name: str) -> dict[str, Any]:
    """How it is got.  Raises MissingSoftware if there is no such name."""
    if name not in RECIPES:
        raise MissingSoftware(f"software.toml has no {name!r}; it has {', '.join(RECIPES)}")
    return RECIPES[name]


def _torch(said: str | None) -> Torch:
    if said is not None and os.sep in said:
        return find_in_folder(Path(said), sys.executable)
    return find(sys.executable, said)


@contextmanager
def _new(folder: Path) -> Iterator[Path]:
    """An empty folder that gets its name when all is in it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        yield made
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _run(*command: str, **options: Any) -> None:
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    except OSError as error:
        raise MissingSoftware(f"{command[0]} does not run: {error.strerror}") from error
    if done.returncode:
        said = done.stdout.strip().splitlines() or [f"exit code {done.returncode}"]
        raise MissingSoftware(f"{' '.join(command[:4])} ...: {said[-1]}")


def main(names: Sequence[str]) -> int:
    try:
        named = names or list(dict.fromkeys(name for row in load() for name in row.software))
        wanted = [*missing(named), *unfetched(named)]
    except MissingSoftware as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    failed = 0
    for name in wanted:
        print(f"getting {name}", file=sys.stderr, flush=True)
        try:
            get(name)
        except TonnageError as error:
            failed += 1
            print(f"error: {name}: {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
