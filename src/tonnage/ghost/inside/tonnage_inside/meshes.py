"""Meshes of jobs that are over: torch's parts that keep one mean, from then on, the equal one of the job that runs.

What DTensor has decided about operations it keeps with the mesh of whoever asked first; to decide it anew takes a
third of a short job.  An old mesh becomes the new one (they share their attributes) as soon as an equal one is made.
Until then it has no groups: whoever asks it for one gets an error, never a group of a job that is over.
"""

import functools
import weakref
from types import ModuleType
from typing import Any

from .imports import after_import

_LEAD_TO_GROUPS = ("_dim_group_names", "_pg_registry", "_root_mesh", "_flatten_mapping")
"""Attributes of a mesh by which torch finds its groups."""

_made: list["weakref.ref[Any]"] = []
"""All meshes of this process."""

_over: dict[Any, list[Any]] = {}
"""Those of jobs that are over and not replaced yet, by what they are equal to."""


def install() -> None:
    """Hear of each mesh that is made."""
    after_import("torch.distributed.device_mesh", _listen)


def end() -> None:
    """The groups of all meshes so far are gone."""
    there = [mesh for mesh in (reference() for reference in _made) if mesh is not None]
    _made[:] = map(weakref.ref, there)
    _over.clear()
    for mesh in there:
        mesh.__dict__ = {name: value for name, value in vars(mesh).items() if name not in _LEAD_TO_GROUPS}
        _over.setdefault(mesh, []).append(mesh)


def _listen(module: ModuleType) -> None:
    kind: Any = getattr(module, "DeviceMesh", None)
    if kind is None:
        return
    original = kind.__init__

    @functools.wraps(original)
    def make(mesh: Any, /, *args: Any, **options: Any) -> None:
        original(mesh, *args, **options)
        for old in _over.pop(mesh, ()):
            old.__dict__ = vars(mesh)
        _made.append(weakref.ref(mesh))

    kind.__init__ = make
