"""Tables as plain columns, for lists that are read, searched and piped; they have no frame and do not wrap."""

from collections.abc import Sequence


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Return rows as aligned text, one line each, with two spaces between columns.

    The columns in `numbers` are aligned to the right.
    """
    lines = [headings, *rows] if headings else list(rows)
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))] if lines else []
    return "".join(f"{_align(line, widths, numbers)}\n" for line in lines)


def _align(cells: Sequence[str], widths: Sequence[int], numbers: Sequence[int]) -> str:
    aligned = [
        cell.rjust(width) if column in numbers else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(aligned).rstrip()
