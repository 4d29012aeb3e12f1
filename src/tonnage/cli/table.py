"""Plain columns for lists that are read, searched and piped; no frame, no wrapping."""

from collections.abc import Sequence


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Rows as aligned text, a line each, two spaces between columns; `numbers` are aligned to the right."""
    lines = [headings, *rows] if headings else list(rows)
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))] if lines else []
    return "".join(f"{_line(line, widths, numbers)}\n" for line in lines)


def _line(cells: Sequence[str], widths: Sequence[int], numbers: Sequence[int]) -> str:
    aligned = [
        cell.rjust(width) if place in numbers else cell.ljust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(aligned).rstrip()
