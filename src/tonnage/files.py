"""Atomic file writes: a file is written under a temporary name beside its target, then renamed onto it."""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

from tonnage.errors import UnreadableFile, UnwritableFile, UsageError
from tonnage.units import format_size

_DRAFT_NAME_LETTERS: Final = 50
"""Characters of the target's name that a draft's name keeps: file systems allow 255 bytes, and a character may take
four of them."""


@contextmanager
def open_replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that replaces `path` when the block ends without an error.

    Until then an existing file stays unchanged, and after an error no half-written file is left.  A target that is
    not a regular file (`/dev/stdout`, a pipe) is written directly.  Raises UnwritableFile.
    """
    try:
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                yield file
            return
        target = path.resolve()
        draft = target.with_name(f".{target.name[:_DRAFT_NAME_LETTERS]}.{secrets.token_hex(8)}.part")
        file = draft.open("xb")
        with _delete_on_error(draft):
            with file:
                if target.exists():
                    with suppress(OSError):  # a file system without permissions
                        draft.chmod(stat.S_IMODE(target.stat().st_mode))
                yield file
            draft.replace(target)  # after closing: some systems cannot rename an open file
    except OSError as error:
        raise _unwritable(path, error) from error


@contextmanager
def _delete_on_error(draft: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, if they do not exist.  Raises UnwritableFile."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnwritableFile(f"The folder {folder} cannot be created ({error.strerror or error}).") from error


def read_text(path: Path, most_bytes: int) -> str:
    """Return the UTF-8 text of a file or a pipe.

    Raises UnreadableFile if it is longer than `most_bytes`, OSError and UnicodeDecodeError.
    """
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise UnreadableFile(f"{path} is larger than {format_size(most_bytes)}; no file of this kind is.")
    return content.decode("utf-8")


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text into a file, whole or not at all.  Raises UnwritableFile."""
    with open_replacing(path) as file:
        file.write(text.encode("utf-8"))


def check_writable(path: Path) -> None:
    """Raise UnwritableFile before the work for what would fail after it.

    Such are a missing folder, a missing permission, and a folder that has the file's name.
    """
    try:
        folder = path.resolve().parent
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long a name, a zero byte, a loop of symbolic links
        raise UnwritableFile(
            f"{str(path)[:80]!r} cannot be written ({getattr(error, 'strerror', None) or error})."
        ) from error
    if path.is_dir():
        raise UnwritableFile(f"{path} cannot be written: it is a folder.")
    if not folder.is_dir():
        raise UnwritableFile(f"{path} cannot be written: there is no folder {folder}.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise UnwritableFile(f"{path} cannot be written: no permission.")


def check_outputs(*paths: Path | None) -> None:
    """Check that a command can write each of its files (`check_writable`), and that no two are the same file.

    Raises UnwritableFile, and UsageError for two answers that would go into one file.
    """
    targets: dict[Path, Path] = {}
    for path in paths:
        if path is None:
            continue
        check_writable(path)
        if targets.setdefault(path.resolve(), path) is not path and (path.is_file() or not path.exists()):
            raise UsageError(f"Two answers would be written to {path}; name another file for one of them.")


def check_replaceable(*paths: Path | None, force: bool) -> None:
    """Raise UsageError for a file that exists and may not be replaced; devices and pipes have no content to lose."""
    for path in paths:
        if path is not None and path.is_file() and not force:
            raise UsageError(f"{path} exists; name another file, or add --force to replace it.")


def _unwritable(path: Path, error: OSError) -> UnwritableFile:
    return UnwritableFile(f"{path} cannot be written ({error.strerror or error}); nothing was changed.")
