"""The files that tonnage keeps: builds of torch, traces of earlier estimates, compiled kernels.

    >>> [part.name for part in list_parts()]
    ['torch', 'traces', 'compiled']

All of it can be fetched or computed again.  Traces have a limit, by default MOST_BYTES of `tonnage.estimates.cache`.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tonnage.errors import UnwritableFile
from tonnage.estimates import cache
from tonnage.ghost.cache_folder import cache_folder

PARTS: Final = {
    "torch": "CUDA builds of torch that the ghost runs, fetched where the installed one is a CPU build",
    "traces": "steps of earlier estimates, used when the same case is asked again",
    "compiled": "kernels that torch.compile and Triton made for the ghost",
}
"""The parts, and what is in them."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of what is kept."""

    name: str
    """A key of PARTS."""
    entries: int
    """Number of builds, traces or files."""
    bytes: int
    """Bytes on disk."""
    limit_bytes: int | None
    """Bytes above which the least recently used entries are removed; None: nothing is removed unasked."""


def list_parts() -> tuple[Part, ...]:
    """Return each part with its size."""
    return tuple(_measure(name) for name in PARTS)


def _measure(name: str) -> Part:
    files = [(path, size) for folder in _folders(name) for path, size in _files(folder)]
    return Part(
        name=name,
        entries=len(list(_folders(name))) if name == "torch" else len(files),
        bytes=sum(size for _, size in files),
        limit_bytes=cache.limit_bytes() if name == "traces" else None,
    )


def clear(names: tuple[str, ...]) -> int:
    """Remove everything of these parts, and return the bytes that they had.  Raises UnwritableFile."""
    removed = 0
    for name in names:
        for folder in list(_folders(name)):
            removed += sum(size for _, size in _files(folder))
            try:
                shutil.rmtree(folder)
            except FileNotFoundError:  # another process removes it too
                pass
            except OSError as error:
                raise UnwritableFile(f"{folder} cannot be removed ({error.strerror}).") from error
    return removed


def _folders(name: str) -> Iterator[Path]:
    """Yield the existing folders of a part."""
    if name == "torch":
        yield from sorted(cache_folder().glob("torch-*"))
    elif (folder := cache.folder() if name == "traces" else cache_folder() / name).is_dir():
        yield folder


def _files(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield each file below a folder with its size; files that vanish meanwhile are left out."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            try:
                yield path, path.lstat().st_size
            except OSError:
                continue
