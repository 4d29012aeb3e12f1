"""The filter of text that leaves for a terminal or a page: no escape sequences, no bidirectional characters.

Texts of files, names and keys come from strangers; a terminal would carry out what they hold (retitle the window,
erase the screen, turn letters around).
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

REPLACEMENT: Final = "�"

_LINES: Final = frozenset("\n\t")
_COLOURS: Final = re.compile(r"(\x1b\[[0-9;]*m)")


def make_printable(text: str, *, lines: bool = False, colours: bool = False) -> str:
    """Return the text with each character that does not print replaced: control, format and private ones.

    `lines` keeps line breaks and tabs; `colours` keeps sequences that only set colours, of a page whose values have
    been filtered already.
    """
    if colours:
        parts = enumerate(_COLOURS.split(text))
        return "".join(part if index % 2 else make_printable(part, lines=lines) for index, part in parts)
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or (lines and letter in _LINES) else REPLACEMENT for letter in text)


class Filtered:
    """A text stream that writes only what prints, and is the stream beneath it in everything else.

    A carriage return before a text, with which libraries redraw their progress, is kept.
    """

    def __init__(self, stream: Any) -> None:
        self.beneath = stream

    def write(self, text: str) -> int:
        start = "\r" if text.startswith("\r") else ""
        self.beneath.write(start + make_printable(text[len(start) :], lines=True))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.beneath, name)


@contextmanager
def filtered() -> Iterator[None]:
    """Filter what is written to standard output and standard error until the block ends."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Filtered(sys.stdout), Filtered(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def unfiltered(stream: Any) -> Any:
    """Return the stream beneath the filter, for text that has been filtered and a display that moves the cursor."""
    return unfiltered(stream.beneath) if isinstance(stream, Filtered) else stream
