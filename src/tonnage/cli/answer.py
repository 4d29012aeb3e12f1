"""Output of an Estimate: on standard output, in files, as an exit code."""

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
from tonnage.printable import make_printable, unfiltered

if TYPE_CHECKING:
    from tonnage.estimates.estimate import Estimate
    from tonnage.trace.trace import Trace

_MAX_WIDTH: Final = 120  # longer lines are hard to read
_DEFAULT_WIDTH: Final = 100  # for a pipe or a file
_BEGINNING_BYTES: Final = 2**14  # enough for a page's title and the mark of tonnage's pages after it
_GLYPHS: Final = "█▓▒░▚▞╱▤▦▪·▕▏│└┴─▁×"


@dataclass(frozen=True, kw_only=True)
class Output:
    """Output that the user requested."""

    json: bool = False
    """True for one JSON document on standard output instead of the report."""
    html: Path | None = None
    """File for the page."""
    save: Path | None = None
    """File for the estimate and its traces."""
    snapshot: Path | None = None
    """File for a snapshot of the worst rank."""

    def check(self, *, force: bool) -> None:
        """Check before the work that the files can be written.  Raises UnwritableFile and UsageError.

        Without `force` only files that tonnage itself wrote are replaced.  An existing snapshot is never replaced
        without it, because it may be a recording of torch.
        """
        from tonnage.files import check_outputs, check_replaceable

        check_outputs(self.html, self.save, self.snapshot)
        outputs = ((self.html, _is_page), (self.save, _is_saved))
        check_replaceable(
            *(path for path, is_ours in outputs if path and not is_ours(path)), self.snapshot, force=force
        )

    def check_card(self, gpu: str) -> None:
        """Raise UsageError for a snapshot of a device that has no caching allocator."""
        if self.snapshot is not None and gpu == CPU:
            raise UsageError("--snapshot shows a GPU's caching allocator, and the CPU has none; leave it out.")


def _is_saved(path: Path) -> bool:
    from tonnage.estimates import archive

    return path.is_file() and archive.is_saved(path)


def _is_page(path: Path) -> bool:
    """Return True if a file is a page that tonnage wrote."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            beginning = file.read(_BEGINNING_BYTES)
    except OSError:
        return False
    return beginning.startswith(b"<!DOCTYPE html>") and b'<div class="tonnage">' in beginning


def deliver(
    estimate: "Estimate",
    traces: Callable[[], Sequence["Trace"]],
    wanted: Output,
    complete: Callable[[], "Estimate"] | None = None,
) -> int:
    """Print the answer, write the files, and return the exit code: 0 fits, 1 does not.

    `traces` is called only when a file needs them; it returns the estimate's own rank first.  `complete` takes time
    and returns the estimate with advice: the verdict is printed before.  Standard output is written before files, so
    that a full disk does not lose the answer.
    """
    from tonnage.report.terminal import render, render_advice, render_suggestions

    view: dict[str, Any] = {"width": width(), "colour": colour(), "unicode": unicode()}
    if not wanted.json:
        emit(render(estimate, **view, suggests=complete is None), colours=True)
    if complete is not None:
        estimate = complete()
        if not wanted.json:
            parts = (render_suggestions(estimate, **view), render_advice(estimate, **view))
            emit("".join(f"\n{part}" for part in parts if part), colours=True)
    if wanted.json:
        print_json(estimate.to_json())
    if wanted.save is not None:
        from tonnage.estimates import archive

        archive.save(wanted.save, estimate, traces())
        say_written(wanted.save)
    if wanted.html is not None:
        from tonnage.files import write_text
        from tonnage.report.html import page

        write_text(wanted.html, page(estimate))
        say_written(wanted.html)
    if wanted.snapshot is not None:
        from tonnage.report import viewer

        viewer.write(traces()[0], wanted.snapshot)
        say_written(wanted.snapshot)
    return 0 if estimate.fits else 1


def say_written(path: Path) -> None:
    """Report a file that was written on standard error."""
    print(f"wrote {path}", file=sys.stderr)


def print_json(document: Any) -> None:
    """Write exactly one JSON document to standard output."""
    emit(json.dumps(document, indent=2, allow_nan=False) + "\n")


def emit(text: str, *, colours: bool = False) -> None:
    """Write text to standard output.  Raises UnwritableFile for a full disk, but not for a reader that stops reading.

    Characters that its encoding lacks (in names, on a Windows console) are written as escapes, and what does not
    print is replaced; `colours` keeps the colours of a report.
    """
    encoding = sys.stdout.encoding or "utf-8"
    stream = unfiltered(sys.stdout)
    shown = make_printable(text, lines=True, colours=colours)
    try:
        stream.write(shown.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        _discard_output()
    except OSError as error:
        _discard_output()
        raise UnwritableFile(f"The answer could not be printed ({error.strerror}).") from error


def _discard_output() -> None:
    """Redirect standard output to the null device; otherwise Python reports the error again when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def width() -> int:
    """Return the columns of the terminal, or those in COLUMNS; a fixed number for a pipe or a file."""
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        return _DEFAULT_WIDTH
    return min(shutil.get_terminal_size((_DEFAULT_WIDTH, 24)).columns, _MAX_WIDTH)


def colour() -> bool:
    """Return True for a terminal with colours, unless NO_COLOR is set (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def unicode() -> bool:
    """Return True if the encoding of standard output has the glyphs of the pictures."""
    try:
        _GLYPHS.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
