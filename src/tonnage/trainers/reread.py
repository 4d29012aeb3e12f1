"""A check that a target reads an export as it was meant: its own objects are made of the files, and compared.

Most trainers ignore keys that they do not know, so it is not enough that a file is accepted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tonnage.errors import CannotEstimate, GhostUnavailable
from tonnage.trainers import packages

if TYPE_CHECKING:
    from tonnage.trainers.target import Export, Target

TIMEOUT_SECONDS: Final = 600.0

_NOT_IMPORTED: Final = 3
"""The exit code of a process in which the trainer could not be imported."""

_ABSENT: Final = "nothing"
"""The value of a setting that the trainer does not have."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The result of reading back."""

    versions: Mapping[str, str]
    """The versions of the packages that read it; empty if none did."""
    missing: tuple[str, ...] = ()
    """Missing packages without which it could not be read."""
    settings: int = 0
    """The number of settings that were read with the values that were written."""
    unread: str = ""
    """Why the installed packages could not read it."""

    def __str__(self) -> str:
        if self.missing:
            verb = "is" if len(self.missing) == 1 else "are"
            return f"not validated: {', '.join(self.missing)} {verb} not installed"
        if self.unread:
            return f"not validated: {self.unread}"
        by = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"read back by {by}: all {self.settings} settings are read as they were written"


def check(export: Export, to: Target) -> Checked:
    """Have the target's own code read the files, in a process of its own, and compare every setting.

    Raises CannotEstimate with the setting that it reads differently, or with its error about the files.
    """
    missing = packages.missing(to.packages)
    if missing:
        return Checked(versions={}, missing=tuple(missing))
    with tempfile.TemporaryDirectory(prefix="tonnage-export-") as folder:
        for item in export.files:
            (Path(folder) / item.name).write_text(item.text, encoding="utf-8")
        try:
            settings = _read_back(to, Path(folder))
        except (_NotImported, GhostUnavailable) as error:
            return Checked(versions={}, unread=str(error))
    versions = packages.versions(to.packages)
    for name, value in export.settings.items():
        if not _is_alike(value, settings.get(name, _ABSENT)):
            raise CannotEstimate(
                f"{to.name} does not read its settings as they were meant: {name} was written as {value!r} and is "
                f"{settings.get(name, _ABSENT)!r} ({', '.join(f'{n} {v}' for n, v in versions.items())}); "
                "nothing was written."
            )
    return Checked(versions=versions, settings=len(export.settings))


def _is_alike(written: Any, read: Any) -> bool:
    """Return whether two values are equal: lists in any order, since PEFT makes sets of them, and True is not 1."""
    if isinstance(written, list) and isinstance(read, list):
        return sorted(map(str, written)) == sorted(map(str, read))
    return bool(written == read) and isinstance(written, bool) == isinstance(read, bool)


class _NotImported(Exception):
    """A trainer whose packages are installed and cannot be imported."""


def _read_back(to: Target, folder: Path) -> dict[str, Any]:
    """Return the settings that the target makes of the files in a process of its own."""
    name = to.name
    answer = folder / "reread-answer.json"
    try:
        child = subprocess.run(
            [sys.executable, "-m", "tonnage.trainers.reread", name, str(folder), str(answer)],
            env=_with_ghost(_environment()) if to.on_ghost else _environment(),
            cwd=folder,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise CannotEstimate(
            f"{name} has not read what was written for it within {TIMEOUT_SECONDS:.0f} s; nothing was written."
        ) from error
    if child.returncode == 0 and answer.is_file():
        settings: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return settings
    if child.returncode == _NOT_IMPORTED:
        raise _NotImported(f"{name} cannot be imported here: {child.stderr.strip().splitlines()[-1][:300]}")
    reason = (child.stderr.strip().splitlines() or ["it said nothing"])[-1]
    raise CannotEstimate(f"{name} does not take what was written for it: {reason[:300]}; nothing was written.")


def _environment() -> dict[str, str]:
    """Return the environment without a launcher's variables and without a card: no answer may depend on them."""
    launchers = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {n: v for n, v in os.environ.items() if not n.startswith(launchers) and n not in ranks}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


def _with_ghost(variables: dict[str, str]) -> dict[str, str]:
    """Return these variables with a ghost GPU.  Raises GhostUnavailable."""
    from tonnage.ghost.environment import environment

    ghost = environment(inherit=variables)
    return {**ghost, "PYTHONPATH": f"{ghost['PYTHONPATH']}{os.pathsep}{Path(__file__).parents[2]}"}


def _main(name: str, folder: str, answer: str) -> None:
    from tonnage.trainers.targets import find_target

    try:
        settings = find_target(name).reread(Path(folder))
    except ImportError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(_NOT_IMPORTED)
    Path(answer).write_text(json.dumps(dict(settings), default=str), encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])
