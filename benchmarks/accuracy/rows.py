"""The published rows: what was measured, where it is written, and which script of ours takes the same step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
PUBLISHED: Final = ROOT / "measurements" / "published"
METRICS: Final = ("allocated", "active", "reserved", "process", "after")
"""The most of four kinds of memory (active: allocated, or freed and not yet past its streams), and what is allocated
after a step."""
LISTS: Final = ("software", "software_assumed", "assumed")
"""What a line has as lists."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured run."""

    name: str
    """Unique within its source."""
    source: str
    """The group of rows that the table has a line for."""
    url: str
    """Where the figures were published."""
    public: bool
    """Whether the script is public."""
    calibrates: bool = False
    """Whether a constant of the mapping was read off this row; such rows are reported apart."""
    gpu: str
    """The card, by its id in tonnage's catalog."""
    script: str
    """The module of `benchmarks.accuracy.scripts` that takes the same step."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """What its `measure` is called with."""
    ranks: int = 1
    """Processes of the job, one a card."""
    rank: int = 0
    """The one that was measured."""
    software: tuple[str, ...] = ()
    """What its process is given in place of what is installed, by names of software.toml."""
    measured: dict[str, float]
    """GiB by metric, one of METRICS."""
    rivals: dict[str, dict[str, float]] = field(default_factory=dict)
    """What other tools are published to predict of it, at the same address: GiB by tool and metric."""
    versions: dict[str, str] = field(default_factory=dict)
    """What it was measured with, where that is stated."""
    stated: dict[str, Any] = field(default_factory=dict)
    """What else the source says of the run, for whoever looks for causes."""
    software_assumed: tuple[str, ...] = ()
    """What the source does not say of the software (a version, a program's day, a unit), and what was taken."""
    assumed: tuple[str, ...] = ()
    """What the source does not say of the configuration (a card, a length, what data decide), and what was taken."""

    @property
    def configured(self) -> bool:
        """Whether script and configuration are public, all of it; a version may have been taken."""
        return self.public and not self.assumed

    @property
    def complete(self) -> bool:
        """Whether the source says all of the run: script, configuration and versions."""
        return self.configured and bool(self.versions) and not self.software_assumed

    @property
    def job(self) -> str:
        """Equal for rows that one run answers."""
        run = [self.gpu, self.script, self.software, self.arguments, self.ranks, self.rank]
        return json.dumps(run, sort_keys=True)


def load(folder: Path = PUBLISHED) -> list[Row]:
    """All rows, in the order of their files.  Raises ValueError for a row that cannot be read or is there twice."""
    rows = [row for path in sorted(folder.glob("*.jsonl")) for row in _rows(path)]
    names = [(row.source, row.name) for row in rows]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is there {names.count(name)} times")
    return rows


def _rows(path: Path) -> Iterator[Row]:
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            values = json.loads(line)
            row = Row(**values | {name: tuple(values.get(name, ())) for name in LISTS})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path.name}:{number}: {error}") from error
        if not row.measured or set(row.measured) - set(METRICS):
            raise ValueError(f"{path.name}:{number}: measured must name some of {', '.join(METRICS)}")
        yield row
