"""Whether a target reads an export as it was meant: its own objects are made of the files, and asked.

Most trainers take keys that they do not know without a word, so that a file that is accepted says little.
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
from tonnage.trainers import installed

if TYPE_CHECKING:
    from tonnage.trainers.target import Export, Target

TIMEOUT_SECONDS: Final = 600.0

_NOT_IMPORTED: Final = 3
"""How a process ends in which the trainer could not be imported."""

_ABSENT: Final = "nothing"


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What reading back has shown."""

    versions: Mapping[str, str]
    """Of the packages that read it; empty if none did."""
    missing: tuple[str, ...] = ()
    """Packages without which nobody could read it."""
    settings: int = 0
    """How many settings were found again with the values that were written."""
    unread: str = ""
    """Why the installed packages could not be asked."""

    def __str__(self) -> str:
        if self.missing:
            verb = "is" if len(self.missing) == 1 else "are"
            return f"not validated: {', '.join(self.missing)} {verb} not installed"
        if self.unread:
            return f"not validated: {self.unread}"
        by = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"read back by {by}: all {self.settings} settings are as the plan says"


def check(export: Export, to: Target) -> Checked:
    """Have the target's own code read the files, in a process of its own.

    Raises CannotEstimate with the setting that it reads differently, or with what it says against the files.
    """
    missing = installed.missing(to.packages)
    if missing:
        return Checked(versions={}, missing=tuple(missing))
    with tempfile.TemporaryDirectory(prefix="tonnage-export-") as folder:
        for item in export.files:
            (Path(folder) / item.name).write_text(item.text, encoding="utf-8")
        try:
            found = _asked(to, Path(folder))
        except (_NotImported, GhostUnavailable) as error:
            return Checked(versions={}, unread=str(error))
    versions = installed.versions(to.packages)
    for name, value in export.settings.items():
        if not _alike(value, found.get(name, _ABSENT)):
            raise CannotEstimate(
                f"{to.name} does not read its settings as they were meant: {name} was written as {value!r} and is "
                f"{found.get(name, _ABSENT)!r} ({', '.join(f'{n} {v}' for n, v in versions.items())}); "
                "nothing was written."
            )
    return Checked(versions=versions, settings=len(export.settings))


def _alike(written: Any, found: Any) -> bool:
    """Numbers by value; lists whatever their order, since PEFT makes sets of them."""
    if isinstance(written, list) and isinstance(found, list):
        return sorted(map(str, written)) == sorted(map(str, found))
    return bool(written == found) and isinstance(written, bool) == isinstance(found, bool)


class _NotImported(Exception):
    """A trainer whose packages are there, and cannot be imported."""


def _asked(to: Target, folder: Path) -> dict[str, Any]:
    name = to.name
    answer = folder / "reread-answer.json"
    try:
        child = subprocess.run(
            [sys.executable, "-m", "tonnage.trainers.reread", name, str(folder), str(answer)],
            env=_on_a_ghost(_environment()) if to.on_ghost else _environment(),
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
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return found
    if child.returncode == _NOT_IMPORTED:
        raise _NotImported(f"{name} cannot be imported here: {child.stderr.strip().splitlines()[-1][:300]}")
    reason = (child.stderr.strip().splitlines() or ["it said nothing"])[-1]
    raise CannotEstimate(f"{name} does not take what was written for it: {reason[:300]}; nothing was written.")


def _environment() -> dict[str, str]:
    """Without a launcher's variables, and without a card: what a trainer makes of a file must not depend on them."""
    launchers = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {n: v for n, v in os.environ.items() if not n.startswith(launchers) and n not in ranks}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


def _on_a_ghost(variables: dict[str, str]) -> dict[str, str]:
    """The same with a card that is not there.  Raises GhostUnavailable."""
    from tonnage.ghost.process import environment

    found = environment(inherit=variables)
    return {**found, "PYTHONPATH": f"{found['PYTHONPATH']}{os.pathsep}{Path(__file__).parents[2]}"}


def _main(name: str, folder: str, answer: str) -> None:
    from tonnage.trainers.export import target

    try:
        found = target(name).reread(Path(folder))
    except ImportError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(_NOT_IMPORTED)
    Path(answer).write_text(json.dumps(dict(found), default=str), encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])
