"""The memory of this machine, as far as processes started here may hold it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

_ROOT = Path("/")


def memory_bytes() -> int:
    """Bytes of memory that is here; less than the machine's where a container or a batch job may have no more."""
    import psutil

    return min([int(psutil.virtual_memory().total), *_limits(_ROOT)])


def _limits(root: Path) -> Iterator[int]:
    """What Linux's control groups of this process say, and those above them: the least counts.

    Second version: one tree, `memory.max`; first version: a tree for memory, `memory.limit_in_bytes`.  In a container
    the path may be one of the machine, which is not there, and its own group is the top of the tree.
    """
    groups: list[str] = []
    with suppress(OSError):  # another system than Linux
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    for group in groups:
        controllers, _, path = group.partition(":")[2].partition(":")
        if not controllers:
            tree, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            tree, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        own = PurePosixPath(path.lstrip("/"))
        for folder in (own, *own.parents):
            with suppress(OSError, ValueError):  # not there, or "max"
                yield int((tree / folder / name).read_text(encoding="utf-8"))
