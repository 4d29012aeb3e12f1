"""The cache folder, and the check that nobody else can put code into it.

Python imports the unpacked torch from it, and Inductor unpickles its kernels: whoever writes there runs code as this
user.  So it is made for this user alone, and refused where another user could have written.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tonnage.errors import GhostUnavailable, UsageError

_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_ACCESS = stat.S_IRWXG | stat.S_IRWXO
_REMEDY = "set TONNAGE_CACHE to a folder of your own"


def cache_folder() -> Path:
    """Return the folder of unpacked wheels and cached traces.

    It is `$TONNAGE_CACHE`, else `$XDG_CACHE_HOME/tonnage`, else `~/.cache/tonnage`.  A relative XDG_CACHE_HOME is
    ignored, as its specification asks (https://specifications.freedesktop.org/basedir): it would resolve inside
    whatever repository the user stands in.  Raises UsageError.
    """
    if named := os.environ.get("TONNAGE_CACHE"):
        if not os.path.isabs(named):
            raise UsageError(f"TONNAGE_CACHE is {named!r}, which is relative; give a path that begins with {os.sep}.")
        return Path(named)
    caches = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(caches) if os.path.isabs(caches) else _home() / ".cache") / "tonnage"


def _home() -> Path:
    try:
        home = Path.home()
    except RuntimeError:  # a user without an entry in the list of users, and no HOME
        home = Path()
    if not home.is_absolute():
        raise UsageError(f"This user's home folder is unknown or relative (HOME is {str(home)!r}); {_REMEDY}.")
    return home


def make_private(folder: Path) -> None:
    """Create a folder of the cache for this user alone, if it is missing, and check it.

    Raises GhostUnavailable if another user can write there, and OSError.
    """
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    check_private(folder)


def check_private(folder: Path) -> None:
    """Check that no other user can have written into a folder of the cache, or replaced it.

    It, the cache and the parents of both have to belong to this user or root and be writable by no one else; parents
    of the cache may be sticky, as /tmp is.  A folder that is missing passes.  Raises GhostUnavailable.
    """
    if not hasattr(os, "getuid"):  # Windows: a user's own folder is the user's alone
        return
    cache = cache_folder()
    for start in (cache, folder):
        resolved = start.resolve()
        own = {resolved, cache.resolve()}
        for path in (resolved, *resolved.parents):
            if path.exists():
                _check(path, path.stat(), may_be_sticky=path not in own)


def check_executed(folder: Path) -> None:
    """Check a folder of which code is executed, with everything in it, as `check_private` does.

    What no other user can enter needs no look inside.  Raises GhostUnavailable.
    """
    check_private(folder)
    if not hasattr(os, "getuid") or not folder.exists() or not folder.stat().st_mode & _ACCESS:
        return
    for entry in _entries(folder.resolve()):
        status = entry.stat(follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode):  # its own mode says nothing
            if not Path(entry.path).resolve().is_relative_to(folder.resolve()):
                raise GhostUnavailable(f"{entry.path} leads out of the cache, from which code is run; {_REMEDY}.")
        else:
            _check(Path(entry.path), status)


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield what is in a folder and below it, except in folders that cannot be read: nothing there can be run."""
    with suppress(PermissionError), os.scandir(folder) as entries:
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(Path(entry.path))


def _check(path: Path, status: os.stat_result, *, may_be_sticky: bool = False) -> None:
    """Raise GhostUnavailable if others own a path, or can write it."""
    danger = "could run code as you by tonnage's cache"
    if status.st_uid not in (os.getuid(), 0):
        raise GhostUnavailable(f"{path} belongs to the user {status.st_uid}, who {danger}; {_REMEDY}.")
    if status.st_mode & _OTHERS and not (may_be_sticky and status.st_mode & stat.S_ISVTX):
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        raise GhostUnavailable(
            f"Others can write in {path} (mode {mode}) and {danger}; {_REMEDY}, or if only you wrote there: "
            f"chmod -R go-w {path}"
        )
