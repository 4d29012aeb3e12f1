"""Files that appear whole or not at all: written beside their place, then moved into it."""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

from tonnage.errors import UnreadableFile, UnwritableFile, UsageError
from tonnage.units import size

_MOST_OF_A_NAME: Final = 50
"""Characters of a name that its draft has too: file systems allow 255 bytes, of which a letter may take four."""


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes the place of `path` when the block ends without an error.

    Until then an older file stays as it was, and afterwards nothing half-written is left.  What is no regular
    file (`/dev/stdout`, a pipe) is written in place.  Raises UnwritableFile.
    """
    try:
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                yield file
            return
        place = path.resolve()
        draft = place.with_name(f".{place.name[:_MOST_OF_A_NAME]}.{secrets.token_hex(8)}.part")
        file = draft.open("xb")
        with _deleted_on_error(draft):
            with file:
                if place.exists():
                    with suppress(OSError):  # a file system without permissions
                        draft.chmod(stat.S_IMODE(place.stat().st_mode))
                yield file
            draft.replace(place)  # closed, as some systems move no open file
    except OSError as error:
        raise _unwritable(path, error) from error


@contextmanager
def _deleted_on_error(draft: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def read_text(path: Path, most_bytes: int) -> str:
    """The UTF-8 text of a file or a pipe.  Raises UnreadableFile if it is longer, OSError, UnicodeDecodeError."""
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise UnreadableFile(f"{path} is larger than {size(most_bytes)}, which no such file is.")
    return content.decode("utf-8")


def write_text(path: Path, text: str) -> None:
    """Put UTF-8 text into a file, whole or not at all.  Raises UnwritableFile."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def check_writable(path: Path) -> None:
    """Find out before the work what would fail after it: a missing folder, no permission, a folder of that name.

    Raises UnwritableFile.
    """
    try:
        folder = path.resolve().parent
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a byte of zero, links in a circle
        raise UnwritableFile(
            f"{str(path)[:80]!r} cannot be written ({getattr(error, 'strerror', None) or error})."
        ) from error
    if path.is_dir():
        raise UnwritableFile(f"{path} cannot be written: it is a folder.")
    if not folder.is_dir():
        raise UnwritableFile(f"{path} cannot be written: there is no folder {folder}.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise UnwritableFile(f"{path} cannot be written: no permission.")


def check_places(*paths: Path | None) -> None:
    """`check_writable` of files that a command is to write, no two of which are one.  Raises UsageError as well."""
    places: dict[Path, Path] = {}
    for path in paths:
        if path is None:
            continue
        check_writable(path)
        if places.setdefault(path.resolve(), path) is not path and (path.is_file() or not path.exists()):
            raise UsageError(f"Two answers are to go into {path}; name another file for one of them.")


def check_free(*paths: Path | None, force: bool) -> None:
    """Raise UsageError where a file is in the way that may not be replaced; devices and pipes keep nothing."""
    for path in paths:
        if path is not None and path.is_file() and not force:
            raise UsageError(f"{path} exists; name another file, or add --force to replace it.")


def _unwritable(path: Path, error: OSError) -> UnwritableFile:
    return UnwritableFile(f"{path} cannot be written ({error.strerror or error}); nothing was changed.")
