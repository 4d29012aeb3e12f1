"""The interface of every target: a plan in a trainer's own settings, and what the trainer has no setting for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.errors import UsageError
from tonnage.mesh import Mesh, make_mesh
from tonnage.trainers.engine import has_setting
from tonnage.trainers.not_run import find_not_run

if TYPE_CHECKING:
    from tonnage.cluster import Cluster
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.trainers.image_rows import ImageRow


@dataclass(frozen=True, kw_only=True)
class File:
    """A file of an export."""

    name: str
    """Its name within the folder."""
    text: str
    """All of it."""


@dataclass(frozen=True, kw_only=True)
class Unexpressed:
    """A value of the plan that the target has no setting for."""

    option: str
    """The option as on the command line."""
    value: str
    """The plan's value."""
    why: str
    """The reason, in one line."""
    instead: str
    """The value that is written in its place."""


class NotExpressed(UsageError):
    """A plan that a target cannot carry out, though it may have another one for the same job."""


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """A plan to be written for a target, with only those values that the target has settings for."""

    job: Job
    """The job, with grad_accum decided."""
    plan: Plan
    """The plan, without what the target cannot express."""
    cluster: Cluster
    """Where it will run."""
    model: str
    """The name that the target's own loader takes: a Hub id, or a folder."""
    image_row: ImageRow | None = None
    """The shapes of a row, for a network that reads images too."""

    @property
    def axes(self) -> Mesh:
        """The layout of the ranks."""
        return make_mesh(self.plan, self.cluster.gpus, self.cluster.gpus_per_node)


@dataclass(frozen=True, kw_only=True)
class Written:
    """A target's answer to a request."""

    files: tuple[File, ...]
    """Files that are ready to be put into a folder."""
    command: tuple[str, ...]
    """The command that trains, typed in that folder, without environment variables."""
    settings: Mapping[str, Any]
    """Every setting of the target that carries a value of the plan, by its dotted name: `reread` must find it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the launcher needs besides those of the plan."""
    notes: tuple[str, ...] = ()
    """Sentences for whoever runs it."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A trainer that plans are written for."""

    name: str
    """Its name on the command line."""
    packages: tuple[str, ...]
    """Distributions that read the files, the trainer's own first."""
    expresses: Mapping[str, tuple[str, ...]]
    """For each option of Job and Plan the values that it has settings for (`ANY`: all); others must be defaults."""
    why: Mapping[str, str] = field(default_factory=dict)
    """Why it does not do an option, or one value of it (`loss=plain`), where more is known than that it has no
    setting for it, or one that tonnage does not run (`not_run`)."""
    overrides: Callable[[Job, Plan], Mapping[str, tuple[str, Any]]] = lambda job, plan: {}
    """Returns options whose values it has settings for, but not for this job: why, and what is written instead."""
    engine: str | None = None
    """The engine that runs this trainer on a ghost; None: there is none."""
    base_engine: Callable[[Plan], str] | None = None
    """Returns the engine of the trainer that it is built on, where it has none of its own."""
    scripted: bool = False
    """True if a script of ours trains: causal language models by their name or folder."""
    reads_images: bool = False
    """True if that script also trains networks that read images beside text."""
    write: Callable[[ExportRequest], Written]
    """Writes the request; imports neither torch nor the trainer."""
    reread: Callable[[Path], Mapping[str, Any]]
    """Parses the files of a folder as the trainer does, and returns its settings by dotted names, from the objects
    that it made.  Runs in a process of its own; an ImportError of it means that it is not installed correctly."""
    on_ghost: bool = False
    """True if that process needs a card for the trainer to be imported at all."""

    def has_setting(self, option: str, value: Any, default: Any) -> bool:
        """Return whether the target has a setting for this value of an option."""
        return has_setting(self.expresses.get(option), value, default)

    def find_engine(self, plan: Plan) -> str | None:
        """Return the engine that has its memory; None: there is none."""
        return self.engine or (None if self.base_engine is None else self.base_engine(plan))

    def explain(self, option: str, value: Any) -> str:
        """Return why this value of an option cannot be written."""
        stated = self.why.get(f"{option}={value}", self.why.get(option))
        setting = find_not_run(self.name, option, value)
        if setting is not None:
            return f"tonnage does not run that ({setting})" + (f"; {stated}" if stated else "")
        return stated or f"{self.name} has no setting for it"


@dataclass(frozen=True, kw_only=True)
class Export:
    """A plan in a target's settings."""

    target: str
    """The target's name."""
    files: tuple[File, ...]
    """The files of the folder."""
    command: str
    """The command that is typed there."""
    settings: Mapping[str, Any]
    """The settings that were written, by the target's dotted names."""
    notes: tuple[str, ...]
    """Sentences for whoever runs it."""
    unexpressed: tuple[Unexpressed, ...]
    """The values that could not be written."""
    job: Job
    """The job as it was written, with grad_accum decided."""
    plan: Plan
    """The plan as it was written."""

    def to_json(self) -> dict[str, Any]:
        """Return the document of `export --json`."""
        from dataclasses import asdict

        return {
            "schema_version": 1,
            "target": self.target,
            "files": [item.name for item in self.files],
            "command": self.command,
            "settings": dict(self.settings),
            "notes": list(self.notes),
            "unexpressed": [asdict(item) for item in self.unexpressed],
        }


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted names: `{"a": {"b": 1}}` -> `{"a.b": 1}`."""
    settings: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            settings |= flat(value, f"{prefix}{name}.")
        else:
            settings[f"{prefix}{name}"] = value
    return settings


def without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def json_file(name: str, values: Any) -> File:
    """Return a JSON file."""
    return File(name=name, text=json.dumps(values, indent=2) + "\n")
