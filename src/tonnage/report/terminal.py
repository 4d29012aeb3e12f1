"""An Estimate as text for a terminal: the verdict, then the categories of memory, the timeline, sources.

The report is readable without colour: the pieces of the bar differ by glyph, and each has a line in the legend.  A
terminal that cannot show those glyphs gets ASCII.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tonnage.advice.suggestions_not_run import suggest
from tonnage.estimates.estimate import Estimate, Moment, PhasePeak, capacity_bytes, shown_peak
from tonnage.report import wording
from tonnage.report.canvas import BAD, GOOD, TIGHT, Canvas, draw, text, title
from tonnage.report.engine_words import serving_rows
from tonnage.report.palette import FREE_GLYPH, FREE_LETTER, PHASE_LETTERS
from tonnage.units import format_gib, format_size

_WIDTH_FOR_MEANINGS: Final = 90  # columns from which the legend explains its labels
_WIDTH_FOR_TABLES: Final = 60  # columns from which tables have all their columns
_TIMELINE_ROWS: Final = 7
_RANK_ROWS: Final = 12
_EIGHTHS: Final = " ▁▂▃▄▅▆▇█"
_ALLOCATED: Final = "#0072B2"
_RESERVED: Final = "#999999"
_EDGE: Final = "┃"
_EDGE_LETTER: Final = "!"


def render(
    estimate: Estimate, *, width: int = 100, colour: bool = False, unicode: bool = True, suggests: bool = True
) -> str:
    """Return the report with this width (at least 40, at most 200 columns) and a final newline.

    `suggests` must be False if changes that were tried follow.
    """
    canvas = Canvas.of(width=width, colour=colour, unicode=unicode)
    return draw(_parts(estimate, canvas, suggests), canvas) + _command(estimate)


def render_advice(estimate: Estimate, *, width: int = 100, colour: bool = False, unicode: bool = True) -> str:
    """Return the table of changes that were tried, as `render` would; empty if there is none."""
    canvas = Canvas.of(width=width, colour=colour, unicode=unicode)
    return draw(_advice(estimate, canvas), canvas) + _command(estimate) if estimate.advice else ""


def render_suggestions(estimate: Estimate, *, width: int = 100, colour: bool = False, unicode: bool = True) -> str:
    """Return what may help by the numbers of an estimate, as `render` would; empty if there is nothing, or better."""
    canvas = Canvas.of(width=width, colour=colour, unicode=unicode)
    is_wanted = not wording.has_own_advice(estimate) and suggest(estimate)
    return draw(_suggestions(estimate), canvas) if is_wanted else ""


def _command(estimate: Estimate) -> str:
    """Return the command of the first change on a line of its own, which is not broken so that it can be pasted."""
    return f"  {estimate.advice[0].command}\n" if estimate.advice else ""


def _parts(estimate: Estimate, canvas: Canvas, suggests: bool) -> Iterator[Text | Table | Padding]:
    yield _verdict(estimate)
    yield from _notes(estimate)
    yield from _serving(estimate, canvas)
    yield from _bar(estimate, canvas)
    yield from _out_of_memory(estimate)
    yield from _timeline(estimate, canvas)
    yield from _phases(estimate, canvas)
    yield from _ranks(estimate, canvas)
    yield _facts(estimate)
    if suggests and not wording.has_own_advice(estimate):
        yield from _suggestions(estimate)
    if estimate.advice:
        yield from _advice(estimate, canvas)


# ---- the verdict -----------------------------------------------------------------------------------------------


def _verdict(estimate: Estimate) -> Table:
    style = BAD if not estimate.fits else TIGHT if estimate.is_tight else GOOD
    rows = Table.grid(padding=(0, 2))
    rows.add_column(no_wrap=True)
    rows.add_column()
    rows.add_row(Text(wording.headline(estimate), style=style), text(wording.need(estimate), "bold"))
    rows.add_row("", text(f"{wording.subject(estimate)} on {wording.card(estimate)}"))
    if choices := wording.choices(estimate):
        rows.add_row("", text(choices))
    if host := wording.host_verdict(estimate):
        rows.add_row("", text(host, "" if estimate.host.fits else "bold"))
    return rows


def _notes(estimate: Estimate) -> Iterator[Padding]:
    for note in estimate.notes:
        rows = Table.grid(padding=(0, 1))
        rows.add_row(Text("Note:", style=TIGHT), text(note))
        yield Padding(rows, (1, 0, 0, 0))


def _serving(estimate: Estimate, canvas: Canvas) -> Iterator[Text | Padding]:
    if estimate.serving is not None:
        yield title("The engine, on each GPU", canvas=canvas)
        rows = Table.grid(padding=(0, 2))
        for row in serving_rows(estimate.serving):
            rows.add_row(*map(text, row))
        yield Padding(rows, (0, 0, 0, 2))


# ---- the stacked bar -------------------------------------------------------------------------------------------


def _bar(estimate: Estimate, canvas: Canvas) -> Iterator[Text | Padding]:
    shares = wording.shares(estimate)
    total = sum(share.bytes for share in shares) + wording.free_bytes(estimate)
    if not total:
        return
    capacity = capacity_bytes(estimate)
    whole = "The whole step, on a card without a limit" if estimate.needed else "At the peak"
    heading = f"{whole}: rank {estimate.rank}, {_peak_moment(estimate)}"
    edge_of_card = f"; {_EDGE if canvas.unicode else _EDGE_LETTER} is its edge" if _is_beyond(estimate) else ""
    aside = f"on a card of {format_gib(capacity)}{edge_of_card}" if capacity else ""
    yield title(heading, text(aside, "dim"), canvas)
    bar, edge = Text(), 0
    inner = canvas.width - 2
    bar.append(canvas.ends[0])
    sum_bytes = 0
    for share in shares:
        sum_bytes += share.bytes
        end = round(sum_bytes * inner / total)
        bar.append(_fill(share, canvas) * (end - edge), style=share.look.colour)
        edge = end
    bar.append((FREE_GLYPH if canvas.unicode else FREE_LETTER) * (inner - edge), style="dim")
    bar.append(canvas.ends[1])
    if capacity and _is_beyond(estimate):
        at = 1 + min(round(capacity * inner / total), inner - 1)
        bar = bar[:at] + Text(_EDGE if canvas.unicode else _EDGE_LETTER, style=BAD) + bar[at + 1 :]
    yield bar
    yield Padding(_legend(estimate, shares, canvas), (0, 0, 0, 1))


def _is_beyond(estimate: Estimate) -> bool:
    """Return True if the bar goes on past the card's edge."""
    capacity = capacity_bytes(estimate)
    return capacity is not None and shown_peak(estimate).process_bytes > capacity


def _fill(share: wording.Share, canvas: Canvas) -> str:
    if not canvas.unicode:
        return share.look.letter
    return "█" if canvas.colour else share.look.glyph


def _legend(estimate: Estimate, shares: list[wording.Share], canvas: Canvas) -> Table:
    whole = capacity_bytes(estimate) or estimate.peak.process_bytes
    rows = Table.grid(padding=(0, 2))
    for justify in ("left", "left", "right", "right", "left"):
        rows.add_column(justify=justify, no_wrap=justify != "left" or None)  # type: ignore[arg-type]
    for share in shares:
        rows.add_row(
            Text(_fill(share, canvas), style=share.look.colour),
            text(share.look.label),
            wording.amount(share.bytes),
            wording.percent(share.bytes, whole),
            text(share.look.meaning if canvas.width >= _WIDTH_FOR_MEANINGS else "", "dim"),
        )
    if capacity_bytes(estimate):
        free = wording.free_bytes(estimate)
        mark = FREE_GLYPH if canvas.unicode else FREE_LETTER
        rows.add_row(Text(mark, style="dim"), "free", format_gib(free), wording.percent(free, whole), "")
    return rows


def _peak_moment(estimate: Estimate) -> str:
    peak = shown_peak(estimate)
    return wording.moment(peak.step, peak.phase, peak.layer)


# ---- when it did not fit ---------------------------------------------------------------------------------------


def _out_of_memory(estimate: Estimate) -> Iterator[Text | Padding]:
    if estimate.oom is not None:
        oom = estimate.oom
        yield title(f"Out of memory in {wording.moment(oom.step, oom.phase, oom.layer)}: PyTorch's message")
        yield Padding(text(" ".join(oom.message.split())), (0, 0, 0, 2))
        for frame in wording.frames(oom.stack):
            yield Padding(text(frame, "dim"), (0, 0, 0, 4))


def _suggestions(estimate: Estimate) -> Iterator[Text | Padding]:
    if suggestions := suggest(estimate):
        yield title(wording.ADVICE_TITLE)
        rows = Table.grid(padding=(0, 2))
        rows.add_column(no_wrap=True)
        for item in suggestions:
            rows.add_row(text(item.what, "bold"), text(item.why))
        yield Padding(rows, (0, 0, 0, 2))


# ---- changes that were tried -----------------------------------------------------------------------------------


def _advice(estimate: Estimate, canvas: Canvas) -> Iterator[Text | Padding]:
    yield title(wording.advice_title(estimate))
    rows = _Rows(wording.advice_headings(estimate), () if _has_all_columns(canvas) else (3, 5), wrapped=True)
    for change, *cells in wording.advice_rows(estimate):
        rows.add(text(change, "bold"), *cells)
    yield rows.indent()
    yield Padding(text(wording.advice_note(estimate)), (0, 0, 0, 2))


# ---- the timeline ----------------------------------------------------------------------------------------------


def _timeline(estimate: Estimate, canvas: Canvas) -> Iterator[Text | Padding]:
    if len(estimate.curve) < 2:
        return
    top = max(max(point.reserved_bytes, point.allocated_bytes) for point in estimate.curve)
    if top <= 0:
        return
    margin = len(format_size(top)) + 1
    columns = _columns(estimate.curve, canvas.width - margin - 1)
    yield title("Memory through the steps", _timeline_key(canvas), canvas)
    for row in range(_TIMELINE_ROWS, 0, -1):
        line = Text()
        line.append({_TIMELINE_ROWS: format_size(top), 1: "0"}.get(row, "").rjust(margin - 1) + " ", style="dim")
        line.append("│" if canvas.unicode else "|", style="dim")
        cells = [_cell(column, row, top, canvas) for column in columns]
        for style, run in groupby(cells, key=lambda cell: cell[1]):
            line.append("".join(glyph for glyph, _ in run), style=style)
        yield line
    yield _axis(estimate, columns, margin, canvas)
    if strip := _phase_strip(columns):
        for words in (strip, _phase_key(columns)):
            yield Padding(text(words, "dim"), (0, 0, 0, margin + 1))


def _timeline_key(canvas: Canvas) -> Text:
    allocated, reserved = ("█", "█" if canvas.colour else "░") if canvas.unicode else ("#", ":")
    key = Text()
    key.append(allocated, style=_ALLOCATED).append(" allocated  ", style="dim")
    key.append(reserved, style=_RESERVED).append(" reserved", style="dim")
    key.append(f"; {wording.AXIS}", style="dim")
    return key


@dataclass(frozen=True, kw_only=True)
class _Column:
    """The moments in one character's width of the timeline."""

    first: int
    allocated_bytes: int
    reserved_bytes: int
    phase: str


def _columns(curve: tuple[Moment, ...], width: int) -> list[_Column]:
    columns = []
    for index in range(width):
        first = index * len(curve) // width
        points = curve[first : max((index + 1) * len(curve) // width, first + 1)]
        highest = max(points, key=lambda point: point.allocated_bytes)
        columns.append(
            _Column(
                first=first,
                allocated_bytes=highest.allocated_bytes,
                reserved_bytes=max(point.reserved_bytes for point in points),
                phase=highest.phase,
            )
        )
    return columns


def _cell(column: _Column, row: int, top: int, canvas: Canvas) -> tuple[str, str]:
    """Return the character for one row (1 is the lowest) of a column, and its style."""
    eighths = column.allocated_bytes * _TIMELINE_ROWS * 8 // top - (row - 1) * 8
    is_reserved = round(column.reserved_bytes * _TIMELINE_ROWS / top) >= row
    if not canvas.unicode:
        return ("#", "") if eighths >= 4 else (":", "") if is_reserved else (" ", "")
    if eighths >= 8:
        return ("█", _ALLOCATED)
    if eighths > 0 and canvas.colour:
        return (_EIGHTHS[eighths], _ALLOCATED + (f" on {_RESERVED}" if is_reserved else ""))
    if eighths >= 4:
        return ("▄", _ALLOCATED)
    if is_reserved:
        return ("█" if canvas.colour else "░", _RESERVED)
    return (" ", "")


def _axis(estimate: Estimate, columns: list[_Column], margin: int, canvas: Canvas) -> Text:
    """Return the line under the curve, with a mark at the start of each optimizer step."""
    dash, tick, corner = ("─", "┴", "└") if canvas.unicode else ("-", "+", "+")
    line = [dash] * len(columns)
    position = 0
    for number, start in wording.step_starts(estimate.curve).items():
        column = max(index for index, item in enumerate(columns) if item.first <= start)
        name = f"{tick} step {number} "
        if column >= position and column + len(name) <= len(line):
            line[column : column + len(name)] = name
            position = column + len(name)
        elif column >= position:
            line[column] = tick
    if estimate.oom is not None:
        name = " out of memory ×" if canvas.unicode else " out of memory x"
        if len(line) - len(name) >= position:
            line[-len(name) :] = name
    return Text(" " * margin + corner + "".join(line), style="dim")


def _phase_strip(columns: list[_Column]) -> str:
    return "".join(PHASE_LETTERS.get(column.phase, column.phase[:1] or " ") for column in columns).rstrip()


def _phase_key(columns: list[_Column]) -> str:
    names = dict.fromkeys(column.phase for column in columns)
    return "  ".join(f"{PHASE_LETTERS.get(name, name[:1])} {name}" for name in names if name not in ("", "other"))


# ---- tables and facts ------------------------------------------------------------------------------------------


def _phases(estimate: Estimate, canvas: Canvas) -> Iterator[Text | Padding]:
    if not estimate.phases:
        return
    yield title("Peak of each phase")
    hidden = () if _has_all_columns(canvas) else (3,)
    rows = _Rows(("phase", "allocated", "reserved", "reserved of the card"), hidden)
    capacity, peak = capacity_bytes(estimate), estimate.peak
    whole = PhasePeak(name="whole run", allocated_bytes=peak.allocated_bytes, reserved_bytes=peak.reserved_bytes)
    for phase in (*estimate.phases, *wording.first_and_later(estimate), whole):
        amounts = [wording.amount(value) for value in (phase.allocated_bytes, phase.reserved_bytes)]
        share = wording.percent(phase.reserved_bytes, capacity) if capacity else "-"
        rows.add(text(phase.name), *amounts, share)
    yield rows.indent()


def _ranks(estimate: Estimate, canvas: Canvas) -> Iterator[Text | Padding]:
    groups = wording.rank_rows(estimate)
    if not groups:
        return
    yield title(f"Ranks ({len(estimate.ranks)} were run)")
    rows = _Rows(("rank", "fits", "allocated", "reserved", "process"), () if _has_all_columns(canvas) else (2,))
    for row in groups[:_RANK_ROWS]:
        amounts = [wording.amount(value) for value in (row.allocated_bytes, row.reserved_bytes, row.process_bytes)]
        rows.add(Text(row.ranks), "yes" if row.fits else "no", *amounts)
    yield rows.indent()
    if len(groups) > _RANK_ROWS:
        yield Text(f"  {len(groups) - _RANK_ROWS} more rows in --json", style="dim")


class _Rows:
    """A table with headings, of which some columns can be hidden; the first may be `wrapped`."""

    def __init__(self, headings: Sequence[str], hidden: Sequence[int], *, wrapped: bool = False) -> None:
        self._shown = [column for column in range(len(headings)) if column not in hidden]
        self._table = Table.grid(padding=(0, 2 if hidden else 3))
        for column in self._shown:
            is_amount = column > 0 and _is_amount(headings[column])
            self._table.add_column(
                justify="right" if is_amount else "left", no_wrap=column > 0 or not (hidden or wrapped)
            )
        self.add(*(Text(heading, style="dim") for heading in headings))

    def add(self, *cells: Text | str) -> None:
        self._table.add_row(*(cells[column] for column in self._shown))

    def indent(self) -> Padding:
        """Return the table, indented."""
        return Padding(self._table, (0, 0, 0, 2))


def _has_all_columns(canvas: Canvas) -> bool:
    """Return True if there is room for all columns of a table."""
    return canvas.width >= _WIDTH_FOR_TABLES


def _is_amount(heading: str) -> bool:
    return heading not in ("fits", "rank", "phase", "change", "mathematics")


def _facts(estimate: Estimate) -> Padding:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(no_wrap=True)
    for name, lines in wording.facts(estimate):
        for index, line in enumerate(lines):
            rows.add_row(Text("" if index else name, style="dim"), text(line))
    return Padding(rows, (1, 0, 0, 0))
