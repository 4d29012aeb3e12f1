"""The host memory that processes on this machine can use: the machine's total, or the limit of their cgroup."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

_ROOT = Path("/")


def memory_bytes() -> int:
    """Return the bytes of usable memory: the machine's total, or the lower limit of a container or batch job."""
    import psutil

    return min([int(psutil.virtual_memory().total), *_cgroup_limits(_ROOT)])


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Yield the memory limits of this process's Linux control groups and of their parents; the lowest counts.

    cgroup v2 has one tree with `memory.max`, v1 has a tree for memory with `memory.limit_in_bytes`.  In a container
    the path may be the host's, which does not exist inside; the container's own group is the root of the tree.
    """
    groups: list[str] = []
    with suppress(OSError):  # not on Linux
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
            with suppress(OSError, ValueError):  # no such file, or "max"
                yield int((tree / folder / name).read_text(encoding="utf-8"))
