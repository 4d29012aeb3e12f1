"""How an Estimate leaves the program: on standard output, in files, as an exit code."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tonnage.cluster import CPU
from tonnage.errors import UnwritableFile, UsageError

if TYPE_CHECKING:
    from tonnage.estimates.estimate import Estimate
    from tonnage.trace.trace import Trace

_WIDEST: Final = 120  # a reader's eye loses the line beyond
_UNWATCHED_WIDTH: Final = 100  # what a pipe or a file gets
_BEGINNING_BYTES: Final = 2**14  # a page's title comes before what tells that it is ours
_GLYPHS: Final = "█▓▒░▚▞╱▪·▕▏│└┴─▁×"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the user asked to be given."""

    json: bool = False
    """One JSON document on standard output instead of the report."""
    html: Path | None = None
    """Where a page goes."""
    save: Path | None = None
    """Where estimate and traces go."""
    snapshot: Path | None = None
    """Where a snapshot of the worst rank goes."""

    def check(self, *, force: bool) -> None:
        """Find out before the work whether the files can be written.  Raises UnwritableFile and UsageError.

        Without `force` only what tonnage itself wrote there is replaced.  A snapshot may be torch's own recording.
        """
        from tonnage.files import check_free, check_places

        check_places(self.html, self.save, self.snapshot)
        ours = ((self.html, _is_page), (self.save, _is_saved))
        check_free(*(path for path, wrote in ours if path and not wrote(path)), self.snapshot, force=force)

    def check_card(self, gpu: str) -> None:
        """Raise UsageError for a snapshot of a card that has no caching allocator."""
        if self.snapshot is not None and gpu == CPU:
            raise UsageError("--snapshot is of a GPU's caching allocator, and the CPU has none; leave it out.")


def _is_saved(path: Path) -> bool:
    from tonnage.estimates import archive as saved

    return path.is_file() and saved.is_saved(path)


def _is_page(path: Path) -> bool:
    """Whether a file is a page that tonnage wrote."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            begun = file.read(_BEGINNING_BYTES)
    except OSError:
        return False
    return begun.startswith(b"<!DOCTYPE html>") and b'<div class="tonnage">' in begun


def deliver(estimate: "Estimate", traces: Callable[[], Sequence["Trace"]], wanted: Wanted) -> int:
    """Print the answer, write the files, and return the exit code: 0 fits, 1 does not.

    `traces` is called only when a file needs them; the estimate's own rank comes first.  Standard output comes
    first, so that a full disk does not cost the answer.
    """
    if wanted.json:
        print_json(estimate.to_json())
    else:
        from tonnage.report.terminal import render

        emit(render(estimate, width=width(), colour=colour(), unicode=unicode()))
    if wanted.save is not None:
        from tonnage.estimates import archive as saved

        saved.save(wanted.save, estimate, traces())
    if wanted.html is not None:
        from tonnage.files import write_text
        from tonnage.report.html import page

        write_text(wanted.html, page(estimate))
    if wanted.snapshot is not None:
        from tonnage.report import viewer

        viewer.write(traces()[0], wanted.snapshot)
    return 0 if estimate.fits else 1


def print_json(document: Any) -> None:
    """Exactly one JSON document on standard output."""
    emit(json.dumps(document, indent=2, allow_nan=False) + "\n")


def emit(text: str) -> None:
    """Put text on standard output.  A reader that has seen enough is no error; a full disk is: UnwritableFile.

    Letters that its encoding does not have (of names, on a Windows console) are written as escapes.
    """
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        _silence()
    except OSError as error:
        _silence()
        raise UnwritableFile(f"The answer could not be printed ({error.strerror}).") from error


def _silence() -> None:
    """Give standard output somewhere to go, or Python complains once more when it closes it at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def width() -> int:
    """Columns of the terminal, or of COLUMNS; a fixed number where nobody watches."""
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        return _UNWATCHED_WIDTH
    return min(shutil.get_terminal_size((_UNWATCHED_WIDTH, 24)).columns, _WIDEST)


def colour() -> bool:
    """Whether to colour: a terminal that can, and nobody who set NO_COLOR (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def unicode() -> bool:
    """Whether standard output can carry the glyphs of the pictures."""
    try:
        _GLYPHS.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
