"""An overlay of files: a run's checkpoints are saved in a folder of its own and seen at the paths that it named.

Programs write a checkpoint under another name and rename it, link or copy the best one, and remove the oldest.  All
this happens in the run's folder, in which the paths that the program named are repeated; a function that opens or
inspects such a path finds the file that the run saved.  Checkpoints that existed when the run began are neither
overwritten nor renamed nor removed.
"""

import builtins
import functools
import io
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHECKPOINTS = (".pt", ".pth", ".ckpt", ".safetensors", ".pt.tar", ".pth.tar")
"""Endings of the names of checkpoints."""

_LOOKING = ("stat", "lstat", "listdir", "scandir", "readlink")
"""Functions of `os` that inspect a path, and fail if nothing is there."""

_TOUCHING = ("chmod", "utime")
"""Functions of `os` that change a file's metadata."""

_LISTS = (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks)
"""Sets of functions that `os` declares able to do something; other modules look up the functions in them."""

_stat, _lstat, _unlink, _symlink = os.stat, os.lstat, os.unlink, os.symlink


class Overlay:
    """The files of one run, in `folder`; `use` is called when a program was kept from its own."""

    def __init__(self, folder: Path, use: Callable[[str], None]) -> None:
        self._folder, self._use = folder, use
        self._began = time.time()

    def path_for_writing(self, path: Any) -> Path:
        """Return the path in the run's folder for writing at `path`, and create its parent folder.

        Paths in the run's folder stay as they are.
        """
        target = self._path_in_run(path)
        if str(target) != os.path.abspath(path):
            self._use("files")
        target.parent.mkdir(parents=True, exist_ok=True)
        if os.path.islink(target):  # a link to a checkpoint of the user's, which would be overwritten
            _unlink(target)
        return target

    def saved_path(self, path: Any) -> Path | None:
        """Return the file or folder that was saved as `path` in this run, if any."""
        if not _is_path(path):
            return None
        saved = self._path_in_run(path)
        return saved if _exists(saved) else None

    def holds(self, path: Any) -> bool:
        """Return whether the path is in the folder of the run."""
        return _is_path(path) and Path(os.path.abspath(path)).is_relative_to(self._folder)

    def install(self) -> None:
        """Make Python's own functions for files find the run's files from now on."""
        for name in _LOOKING:
            _change(os, name, self._looking)
        for name in _TOUCHING:
            _change(os, name, self._touching)
        for name in ("rename", "replace"):
            _change(os, name, self._moving)
        for name in ("remove", "unlink"):
            _change(os, name, self._removing)
        for name in ("link", "symlink"):
            _change(os, name, self._linking)
        _change(shutil, "copyfile", self._copying)
        _change(shutil, "rmtree", self._clearing)
        builtins.open = io.open = self._opening(io.open)  # type: ignore[assignment]

    def _path_in_run(self, path: Any) -> Path:
        absolute = Path(os.path.abspath(path))
        if absolute.is_relative_to(self._folder):
            return absolute
        return self._folder / absolute.relative_to(absolute.anchor)

    def _older(self, path: Any) -> bool:
        """Return whether this is a checkpoint that existed before the run."""
        if not is_checkpoint(path) or self.holds(path):
            return False
        try:
            return _lstat(path).st_ctime < self._began
        except OSError:
            return False

    def _stand_in(self, source: Any, target: Any) -> None:
        """Make a checkpoint of the user's visible at another path, too."""
        _symlink(os.path.abspath(source), self._emptied(target))

    def _emptied(self, path: Any) -> Path:
        """Return `path_for_writing(path)` after removing a file there."""
        target = self.path_for_writing(path)
        if _exists(target):
            _unlink(target)
        return target

    def _looking(self, original: Any) -> Any:
        def look(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            here = kwargs.get("dir_fd") is None
            if here and is_checkpoint(path):
                return original(self.saved_path(path) or path, *args, **kwargs)
            try:
                return original(path, *args, **kwargs)
            except FileNotFoundError:
                kept = self.saved_path(path) if here else None
                if kept is None:
                    raise
            return original(kept, *args, **kwargs)

        return look

    def _touching(self, original: Any) -> Any:
        def touch(path: Any, *args: Any, **kwargs: Any) -> None:
            try:
                original(path, *args, **kwargs)
            except FileNotFoundError:
                if self.saved_path(path) is None:
                    raise

        return touch

    def _opening(self, original: Any) -> Any:
        @functools.wraps(original)
        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            writes = is_checkpoint(file) and set("wxa") & set(mode)
            path = self.path_for_writing(file) if writes else self.saved_path(file) or file
            return original(path, mode, *args, **kwargs)

        return opened

    def _moving(self, original: Any) -> Any:
        def move(source: Any, target: Any, **kwargs: Any) -> None:
            kept = self.saved_path(source)
            if kept is not None:
                original(kept, self.path_for_writing(target))
            elif self._older(source):
                self._stand_in(source, target)
            elif is_checkpoint(target):
                shutil.copyfile(source, self._emptied(target))
                _unlink(source)
            else:
                original(source, target, **kwargs)

        return move

    def _removing(self, original: Any) -> Any:
        def remove(path: Any, *, dir_fd: int | None = None) -> None:
            kept = self.saved_path(path) if dir_fd is None else None
            if kept is not None:
                original(kept)
            elif dir_fd is None and self._older(path):
                self._use("files")
            else:
                original(path, dir_fd=dir_fd)

        return remove

    def _linking(self, original: Any) -> Any:
        def link(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
            paths = _is_path(source) and _is_path(target)
            kept = self.saved_path(os.path.join(os.path.dirname(target), source)) if paths else None
            kept = kept or self.saved_path(source)
            if kept is None:
                original(source, target, *args, **kwargs)
            else:
                original(kept, self.path_for_writing(target), *args, **kwargs)

        return link

    def _copying(self, original: Any) -> Any:
        def copyfile(source: Any, target: Any, **kwargs: Any) -> Any:
            kept = self.saved_path(source)
            if kept is not None:
                copy_with_holes(kept, self.path_for_writing(target))
            elif is_checkpoint(target) and not self.holds(target):
                self._stand_in(source, target)
            else:
                original(source, target, **kwargs)
            return target

        return copyfile

    def _clearing(self, original: Any) -> Any:
        def rmtree(path: Any, *args: Any, **kwargs: Any) -> None:
            kept = self.saved_path(path)
            if kept is not None:
                original(kept, *args, **kwargs)
            if self._has_older(path):
                self._use("files")
            elif kept is None or (str(kept) != os.path.abspath(path) and _exists(path)):
                original(path, *args, **kwargs)

        return rmtree

    def _has_older(self, folder: Any) -> bool:
        if not _is_path(folder) or self.holds(folder):
            return False
        return any(self._older(os.path.join(parent, name)) for parent, _, names in os.walk(folder) for name in names)


def _change(module: Any, name: str, change: Callable[[Any], Any]) -> None:
    original = getattr(module, name)
    changed = functools.wraps(original)(change(original))
    for able in _LISTS:
        if original in able:
            able.add(changed)
    setattr(module, name, changed)


def _exists(path: Any) -> bool:
    try:
        return bool(_stat(path))
    except OSError:
        return False


def _is_path(path: Any) -> bool:
    return isinstance(path, str | os.PathLike) and isinstance(os.fspath(path), str)


def is_checkpoint(path: Any) -> bool:
    """Return whether a path is a checkpoint's, by its name alone."""
    return _is_path(path) and os.fspath(path).endswith(CHECKPOINTS)


def copy_with_holes(source: Path, target: Path) -> None:
    """Copy a file with its holes."""
    with source.open("rb") as read, target.open("wb") as written:
        end, size = 0, os.fstat(read.fileno()).st_size
        while end < size:
            try:
                begin = os.lseek(read.fileno(), end, os.SEEK_DATA)
            except OSError:  # nothing but a hole follows
                break
            end = os.lseek(read.fileno(), begin, os.SEEK_HOLE)
            read.seek(begin)
            written.seek(begin)
            written.write(read.read(end - begin))
        written.truncate(size)
