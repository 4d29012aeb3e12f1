"""Temporary folders that a later run removes if this one is killed before it can.

Each has a file that is locked as long as its creator lives; the system unlocks it however that process ends.
"""

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

LOCK: Final = "lock"
"""The name of the locked file."""


@contextlib.contextmanager
def scratch(prefix: str, within: Path | None = None) -> Iterator[Path]:
    """Create a folder that is deleted when the block is left, after deleting those that killed runs have left.

    Its parent is `within`, or else the folder for temporary files.  Raises OSError.
    """
    parent = Path(tempfile.gettempdir()) if within is None else within
    for lock in parent.glob(f"{prefix}*/{LOCK}"):
        if _is_abandoned(lock):
            shutil.rmtree(lock.parent, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as name,
        _held(Path(name)),
    ):
        yield Path(name)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Keep a folder locked; its file gets its name only once locked, so an unlocked one has no living creator."""
    import fcntl  # not every system has it, and on none without it a ghost runs

    draft = folder / f"{LOCK}.new"
    with draft.open("w") as file:
        with contextlib.suppress(OSError):  # a file system that locks nothing: what is left there stays
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            draft.rename(folder / LOCK)
        yield


def _is_abandoned(lock: Path) -> bool:
    """Return whether the folder is ours, nobody holds its lock, and no process has it in its command."""
    import fcntl

    try:
        folder = lock.parent.lstat()
        if folder.st_uid != os.getuid() or not stat.S_ISDIR(folder.st_mode):
            return False
        file = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # its creator is deleting it
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return not _is_named(lock.parent)
    except OSError:
        return False
    finally:
        os.close(file)


def _is_named(folder: Path) -> bool:
    """Return whether a process has a folder in its command or environment; those of other users cannot be read."""
    name = os.fsencode(folder)
    for process in Path("/proc").glob("[0-9]*"):
        for source in ("cmdline", "environ"):
            with contextlib.suppress(OSError):
                if name in (process / source).read_bytes():
                    return True
    return False
