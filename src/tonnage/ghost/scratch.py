"""Temporary folders, which a later run removes where this one is killed before it can.

In each lies a file that is locked as long as whoever made it lives: the system unlocks it, however that ends.
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
    """A folder that is deleted when the block is left.  Before, those that killed runs have left are deleted.

    It lies in the folder `within`, else in the one for temporary files.  Raises OSError.
    """
    place = Path(tempfile.gettempdir()) if within is None else within
    for lock in place.glob(f"{prefix}*/{LOCK}"):
        if _is_abandoned(lock):
            shutil.rmtree(lock.parent, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=place, ignore_cleanup_errors=True) as name, _held(Path(name)):
        yield Path(name)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Keep it locked.  The file has its name only then, so that whoever finds it unlocked finds nobody."""
    import fcntl  # not every system has it, and on none without it a ghost runs

    draft = folder / f"{LOCK}.new"
    with draft.open("w") as file:
        with contextlib.suppress(OSError):  # a file system that locks nothing: what is left there stays
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            draft.rename(folder / LOCK)
        yield


def _is_abandoned(lock: Path) -> bool:
    """Whether its folder is ours, nobody holds the lock, and no process was told of the folder."""
    import fcntl

    try:
        folder = lock.parent.lstat()
        if folder.st_uid != os.getuid() or not stat.S_ISDIR(folder.st_mode):
            return False
        file = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # whoever had it deletes it just now
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return not _is_named(lock.parent)
    except OSError:
        return False
    finally:
        os.close(file)


def _is_named(folder: Path) -> bool:
    """Whether a process has it in its command or environment; those of other users cannot be read."""
    name = os.fsencode(folder)
    for process in Path("/proc").glob("[0-9]*"):
        for told in ("cmdline", "environ"):
            with contextlib.suppress(OSError):
                if name in (process / told).read_bytes():
                    return True
    return False
