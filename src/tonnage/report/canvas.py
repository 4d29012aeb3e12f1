"""What reports for a terminal are drawn on, and the parts that they share: titles, tables, text from strangers."""

import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

LEAST_WIDTH: Final = 40
"""Columns that an Estimate needs to be read."""

LEAST_OF_PLANS: Final = 60
"""Columns that plans need, whose tables hold words."""

MAX_WIDTH: Final = 200

GOOD, TIGHT, BAD = "bold #009E73", "bold #E69F00", "bold #D55E00"
"""Colours of verdicts."""

Part = Text | Table | Padding
"""What a report is made of."""


@dataclass(frozen=True, kw_only=True)
class Canvas:
    """What the text is drawn on."""

    width: int
    """Columns, from 40 to 200."""
    colour: bool
    """Whether escape sequences for colour may be used."""
    unicode: bool = True
    """Whether block characters can be shown."""

    @staticmethod
    def of(*, width: int, colour: bool, unicode: bool, least: int = LEAST_WIDTH) -> "Canvas":
        """A canvas as wide as asked for, within what can be read: from `least` columns on."""
        return Canvas(width=min(max(width, least), MAX_WIDTH), colour=colour, unicode=unicode)

    @property
    def ends(self) -> tuple[str, str]:
        """What stands before and after a bar."""
        return ("▕", "▏") if self.unicode else ("|", "|")


def drawn(parts: Iterable[Part], canvas: Canvas) -> str:
    """The parts one below the other, ending in a newline."""
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
    """A heading after an empty line; what is said aside goes on a line of its own where there is no room."""
    line = Text("\n")
    line.append_text(text(words, "bold"))
    if aside and canvas is not None:
        line.append("  " if len(words) + len(aside) + 2 <= canvas.width else "\n")
        line.append_text(aside)
    return line


def text(value: str, style: str = "") -> Text:
    """Text from a value, which may come from a stranger's file: nothing in it reaches the terminal as a command."""
    return Text("".join(letter if letter.isprintable() else "�" for letter in value), style=style)
