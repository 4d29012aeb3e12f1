"""The interface of every target: what a plan becomes in a trainer's own words, and what it has no words for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.mesh import Axes, axes
from tonnage.trainers.engine import has_words

if TYPE_CHECKING:
    from tonnage.cluster import Cluster
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.trainers.image_rows import Seen


@dataclass(frozen=True, kw_only=True)
class File:
    """A file of an export."""

    name: str
    """Within the folder."""
    text: str
    """All of it."""


@dataclass(frozen=True, kw_only=True)
class Unexpressed:
    """A value of the plan that the target has no words for."""

    option: str
    """As on the command line."""
    value: str
    """What the plan says."""
    why: str
    """What stands against it, in one line."""
    instead: str
    """What the export says in its place."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is to be said in a target's words: only values that it has words for."""

    job: Job
    """With grad_accum decided."""
    plan: Plan
    """Without what the target cannot express."""
    cluster: Cluster
    """Where it will run."""
    model: str
    """What the target's own loader takes: a Hub id, or a folder."""
    seen: Seen | None = None
    """What rows hold of a network that reads images too."""

    @property
    def axes(self) -> Axes:
        """How the ranks are laid out."""
        return axes(self.plan, self.cluster.gpus, self.cluster.gpus_per_node)


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a target wrote of a wish."""

    files: tuple[File, ...]
    """Ready to be put into a folder."""
    command: tuple[str, ...]
    """What is typed in that folder to train, without environment variables."""
    settings: Mapping[str, Any]
    """Every setting of the target that carries a value of the plan, by its dotted name: `reread` must find it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the launcher needs besides those of the plan."""
    notes: tuple[str, ...] = ()
    """What somebody who runs it has to know."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A trainer that plans are written for."""

    name: str
    """As on the command line."""
    packages: tuple[str, ...]
    """Distributions that read the files, the trainer's own first."""
    expresses: Mapping[str, tuple[str, ...]]
    """For each option of Job and Plan the values that it has words for (`ANY`: all); others must be the default."""
    why: Mapping[str, str] = field(default_factory=dict)
    """Why it has no words for an option, or for a value of it (`loss=plain`), where more is known than that."""
    besides: Callable[[Job, Plan], Mapping[str, tuple[str, Any]]] = lambda job, plan: {}
    """Options whose values it has words for, but not for this job: why not, and what is said instead."""
    engine: str | None = None
    """The engine that runs this trainer on a ghost; None: there is none."""
    beneath: Callable[[Plan], str] | None = None
    """Where there is none: the engine of what it stands on."""
    scripted: bool = False
    """Whether a script of ours trains: causal language models by their name or folder."""
    sees: bool = False
    """Whether that script also trains networks that read images beside text."""
    write: Callable[[Wish], Written]
    """Says the wish; imports neither torch nor the trainer."""
    reread: Callable[[Path], Mapping[str, Any]]
    """Parses the files of a folder as the trainer does and returns its settings by dotted names, from the objects
    that it made.  Runs in a process of its own; an ImportError of it says that it is not rightly installed."""
    on_ghost: bool = False
    """Whether that process needs a card for the trainer to be imported at all."""

    def has_words(self, option: str, value: Any, default: Any) -> bool:
        """True if the target can say this value of an option."""
        return has_words(self.expresses.get(option), value, default)


@dataclass(frozen=True, kw_only=True)
class Export:
    """A plan in a target's words."""

    target: str
    """Its name."""
    files: tuple[File, ...]
    """What goes into the folder."""
    command: str
    """What to type there."""
    settings: Mapping[str, Any]
    """What was said, by the target's dotted names."""
    notes: tuple[str, ...]
    """What somebody who runs it has to know."""
    unexpressed: tuple[Unexpressed, ...]
    """What could not be said."""

    def to_json(self) -> dict[str, Any]:
        """As `export --json` prints it."""
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
    """Nested settings by dotted names: `{"a": {"b": 1}}` -> `{"a.b": 1}`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
