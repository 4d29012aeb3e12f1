"""The canvas of terminal reports, and the parts that they share: titles, tables, escaped text."""

import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tonnage.printable import make_printable

LEAST_WIDTH: Final = 40
"""Minimum columns for an Estimate."""

LEAST_OF_PLANS: Final = 60
"""Minimum columns for plans, whose tables have text."""

MAX_WIDTH: Final = 200

GOOD, TIGHT, BAD = "bold #009E73", "bold #E69F00", "bold #D55E00"
"""Colours of verdicts."""

Part = Text | Table | Padding
"""One part of a report."""


@dataclass(frozen=True, kw_only=True)
class Canvas:
    """Properties of the terminal on which a report is drawn."""

    width: int
    """Number of columns, from 40 to 200."""
    colour: bool
    """True if escape sequences for colour may be used."""
    unicode: bool = True
    """True if block characters can be shown."""

    @staticmethod
    def of(*, width: int, colour: bool, unicode: bool, least: int = LEAST_WIDTH) -> "Canvas":
        """Return a canvas of this width, limited to the range from `least` to MAX_WIDTH columns."""
        return Canvas(width=min(max(width, least), MAX_WIDTH), colour=colour, unicode=unicode)

    @property
    def ends(self) -> tuple[str, str]:
        """Return the characters before and after a bar."""
        return ("▕", "▏") if self.unicode else ("|", "|")


def draw(parts: Iterable[Part], canvas: Canvas) -> str:
    """Return the parts as text, one below the other, with a final newline."""
    out = io.StringIO()
    console = Console(
        file=out,
        width=canvas.width,
        force_terminal=canvas.colour,
        color_system="256" if canvas.colour else None,
        no_color=not canvas.colour,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
        _environ={},
    )
    for part in parts:
        console.print(part)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    return "\n".join(lines).strip("\n") + "\n"


def title(words: str, aside: Text | None = None, canvas: Canvas | None = None) -> Text:
    """Return a heading after an empty line; `aside` follows it, on its own line where there is no room."""
    line = Text("\n")
    line.append_text(text(words, "bold"))
    if aside and canvas is not None:
        line.append("  " if len(words) + len(aside) + 2 <= canvas.width else "\n")
        line.append_text(aside)
    return line


def text(value: str, style: str = "") -> Text:
    """Return a value as text without control characters, because a value from an untrusted file may contain them."""
    return Text(make_printable(value), style=style)
