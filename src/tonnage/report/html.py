"""An Estimate as HTML: a fragment for notebooks, and a page that stands alone.

No scripts, no fonts, no requests: pictures are inline SVG.  Everything that comes from a value is escaped, because
a saved estimate may come from a stranger.
"""

import json
from collections.abc import Iterable, Iterator
from html import escape
from typing import Final

from tonnage.estimates import Estimate, PhasePeak
from tonnage.report import wording
from tonnage.report.advice import advice
from tonnage.units import gib, size

_WIDTH: Final = 760
_BAR_HEIGHT: Final = 34
_CURVE_HEIGHT: Final = 170
_MARGIN: Final = 72  # left of the curve, for its scale
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"

_ALLOCATED: Final = "#0072B2"
_RESERVED: Final = "#999999"
_PHASE_COLOURS: Final = {
    "load": "#8C6D46",
    "forward": "#56B4E9",
    "backward": "#D55E00",
    "recompute": "#E69F00",
    "optimizer": "#009E73",
}

_STYLE: Final = """
.tonnage { font: 14px/1.5 system-ui, sans-serif; max-width: 780px; }
.tonnage h3 { font-size: 14px; margin: 1.6em 0 .4em; }
.tonnage p { margin: .2em 0; }
.tonnage .answer { font-size: 17px; font-weight: 600; }
.tonnage .fits { color: #009E73; } .tonnage .tight { color: #B77F00; } .tonnage .full { color: #D55E00; }
.tonnage table { border-collapse: collapse; margin: 0; font-size: inherit; }
.tonnage th, .tonnage td { padding: .15em 1.2em .15em 0; text-align: left; vertical-align: top; background: none; }
.tonnage th { font-weight: 400; opacity: .65; white-space: nowrap; }
.tonnage .number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.tonnage .quiet { opacity: .65; }
.tonnage pre { white-space: pre-wrap; margin: .4em 0; font-size: 12px; }
.tonnage code { font-size: 13px; white-space: nowrap; }
.tonnage svg { display: block; margin: .2em 0 .5em; width: 100%; height: auto; }
.tonnage svg text { font: 11px system-ui, sans-serif; fill: currentColor; }
.tonnage .swatch { display: inline-block; width: .8em; height: .8em; border-radius: 2px; }
.tonnage .none { border: 1px solid currentColor; opacity: .5; box-sizing: border-box; }
"""


def fragment(estimate: Estimate) -> str:
    """The report as one `<div>`, with its own style, for a notebook cell or another page."""
    return f'<div class="tonnage"><style>{_STYLE}</style>\n' + "\n".join(_parts(estimate)) + "\n</div>"


def page(estimate: Estimate) -> str:
    """The report as a whole document; the Estimate itself travels in it as JSON, as inert data."""
    data = json.dumps(estimate.to_json()).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{_text(f'{wording.headline(estimate)}: {wording.subject(estimate)}')}</title>\n"
        "<style>:root { color-scheme: light dark; } body { margin: 2em auto; max-width: 780px; padding: 0 1em; }"
        "</style>\n</head>\n<body>\n"
        f'{fragment(estimate)}\n<script type="application/json" class="tonnage-estimate">{data}</script>\n'
        "</body>\n</html>\n"
    )


def _parts(estimate: Estimate) -> Iterator[str]:
    yield _verdict(estimate)
    yield _bar(estimate)
    yield _legend(estimate)
    yield from _out_of_memory(estimate)
    yield from _curve(estimate)
    yield from _phases(estimate)
    yield from _ranks(estimate)
    yield _facts(estimate)


# ---- text ------------------------------------------------------------------------------------------------------


def _verdict(estimate: Estimate) -> str:
    kind = "full" if not estimate.fits else "tight" if wording.is_tight(estimate) else "fits"
    asked = f"{wording.subject(estimate)} on {wording.card(estimate)}"
    notes = "".join(f"<p>Note: {_text(note)}</p>" for note in estimate.notes)
    return (
        f'<p class="answer"><span class="{kind}">{wording.headline(estimate)}</span> {_text(wording.need(estimate))}'
        f'</p>\n<p>{_text(asked)}</p>\n<p class="quiet">{_text(wording.choices(estimate))}</p>{notes}'
    )


def _out_of_memory(estimate: Estimate) -> Iterator[str]:
    if estimate.oom is not None:
        oom = estimate.oom
        yield f"<h3>Out of memory in {_text(wording.moment(oom.step, oom.phase, oom.layer))}, in PyTorch's words</h3>"
        yield f"<p>{_text(' '.join(oom.message.split()))}</p>"
        if oom.stack:
            yield "<pre>" + "\n".join(_text(frame) for frame in wording.frames(oom.stack)) + "</pre>"
    if found := advice(estimate):
        yield "<h3>What to try (then estimate again: none of this is a promise)</h3>"
        yield _table((), [(f"<code>{_text(item.what)}</code>", _text(item.why)) for item in found])


def _phases(estimate: Estimate) -> Iterator[str]:
    if not estimate.phases:
        return
    capacity, peak = wording.capacity_bytes(estimate), estimate.peak
    whole = PhasePeak(name="whole run", allocated_bytes=peak.allocated_bytes, reserved_bytes=peak.reserved_bytes)
    rows = [
        (
            _text(phase.name),
            wording.amount(phase.allocated_bytes),
            wording.amount(phase.reserved_bytes),
            wording.percent(phase.reserved_bytes, capacity) if capacity else "-",
        )
        for phase in (*estimate.phases, *wording.first_and_later(estimate), whole)
    ]
    yield "<h3>Peak of each phase</h3>"
    yield _table(("phase", "allocated", "reserved", "reserved of the card"), rows, numbers=(1, 2, 3))


def _ranks(estimate: Estimate) -> Iterator[str]:
    rows = [
        (
            row.ranks,
            "yes" if row.fits else "no",
            *(wording.amount(value) for value in (row.allocated_bytes, row.reserved_bytes, row.process_bytes)),
        )
        for row in wording.rank_rows(estimate)
    ]
    if rows:
        yield f"<h3>Ranks ({len(estimate.ranks)} were run)</h3>"
        yield _table(("rank", "fits", "allocated", "reserved", "process"), rows, numbers=(2, 3, 4))


def _facts(estimate: Estimate) -> str:
    rows = [
        (f'<span class="quiet">{name}</span>', "<br>".join(map(_text, lines)))
        for name, lines in wording.facts(estimate)
    ]
    return "<h3>How this is known</h3>" + _table((), rows)


def _table(headings: Iterable[str], rows: Iterable[tuple[str, ...]], numbers: tuple[int, ...] = ()) -> str:
    """Cells are HTML already."""

    def line(tag: str, cells: Iterable[str]) -> str:
        marked = (
            f'<{tag} class="number">{cell}</{tag}>' if place in numbers else f"<{tag}>{cell}</{tag}>"
            for place, cell in enumerate(cells)
        )
        return f"<tr>{''.join(marked)}</tr>"

    head = line("th", headings)
    return f"<table>{head if headings else ''}{''.join(line('td', row) for row in rows)}</table>"


def _text(value: str) -> str:
    return escape("".join(letter if letter.isprintable() else "�" for letter in value))


# ---- the stacked bar -------------------------------------------------------------------------------------------


def _bar(estimate: Estimate) -> str:
    shares = wording.shares(estimate)
    whole = max(sum(share.bytes for share in shares) + wording.free_bytes(estimate), 1)
    pieces, left = [], 0.0
    for share in shares:
        width = share.bytes * _WIDTH / whole
        label = f"{share.look.label}: {gib(share.bytes)}"
        inside = (
            f'<text x="{left + width / 2:.1f}" y="{_BAR_HEIGHT / 2 + 4:.0f}" text-anchor="middle" '
            f'style="fill: #fff">{gib(share.bytes)}</text>'
            if width > 62
            else ""
        )
        pieces.append(
            f'<g><title>{_text(label)}</title><rect x="{left:.2f}" y="0" width="{width:.2f}" height="{_BAR_HEIGHT}" '
            f'fill="{share.look.colour}"/>{inside}</g>'
        )
        left += width
    frame = (
        f'<rect x="0.5" y="0.5" width="{_WIDTH - 1}" height="{_BAR_HEIGHT - 1}" fill="none" stroke="currentColor" '
        'stroke-opacity="0.45"/>'
    )
    capacity = wording.capacity_bytes(estimate)
    moment = wording.moment(estimate.peak.step, estimate.peak.phase, estimate.peak.layer)
    aside = f' <span class="quiet">on a card of {gib(capacity)}</span>' if capacity else ""
    return (
        f"<h3>At the peak: rank {estimate.rank}, {_text(moment)}{aside}</h3>\n"
        f'<svg viewBox="0 0 {_WIDTH} {_BAR_HEIGHT}" role="img" aria-label="Memory by category at the peak">'
        f"{''.join(pieces)}{frame}</svg>"
    )


def _legend(estimate: Estimate) -> str:
    whole = wording.capacity_bytes(estimate) or estimate.peak.process_bytes
    rows = [
        (
            f'<span class="swatch" style="background: {share.look.colour}"></span>',
            _text(share.look.label),
            wording.amount(share.bytes),
            wording.percent(share.bytes, whole),
            f'<span class="quiet">{_text(share.look.meaning)}</span>',
        )
        for share in wording.shares(estimate)
    ]
    if wording.capacity_bytes(estimate):
        free = wording.free_bytes(estimate)
        rows.append(('<span class="swatch none"></span>', "free", gib(free), wording.percent(free, whole), ""))
    return _table((), rows, numbers=(2, 3))


# ---- the timeline ----------------------------------------------------------------------------------------------


def _curve(estimate: Estimate) -> Iterator[str]:
    points = estimate.curve
    top = max((max(point.reserved_bytes, point.allocated_bytes) for point in points), default=0)
    if len(points) < 2 or top <= 0:
        return
    reserved = _area([point.reserved_bytes for point in points], top, _RESERVED, 0.45)
    allocated = _area([point.allocated_bytes for point in points], top, _ALLOCATED, 1)
    yield '<h3>Memory through the steps <span class="quiet">across: modules as they ran, not seconds</span></h3>'
    yield (
        f'<svg viewBox="0 0 {_WIDTH} {_CURVE_HEIGHT + 40}" role="img" aria-label="Allocated and reserved memory">'
        f"{_scale(top)}{reserved}{allocated}{''.join(_phase_strip(estimate))}{''.join(_steps(estimate))}</svg>"
    )
    seen = dict.fromkeys(point.phase for point in points if point.phase in _PHASE_COLOURS)
    keys = [("allocated", _ALLOCATED), ("reserved", _RESERVED), *((name, _PHASE_COLOURS[name]) for name in seen)]
    yield f"<p>{' &nbsp; '.join(_key(name, colour) for name, colour in keys)}</p>"


def _key(name: str, colour: str) -> str:
    return f'<span class="swatch" style="background: {colour}"></span> <span class="quiet">{_text(name)}</span>'


def _across(index: float, count: int) -> float:
    return _MARGIN + index * (_WIDTH - _MARGIN) / count


def _height(value_bytes: int, top: int) -> float:
    return 8 + (_CURVE_HEIGHT - 8) * (1 - value_bytes / top)


def _area(values: list[int], top: int, colour: str, opacity: float) -> str:
    """A filled staircase: each moment holds its value until the next."""
    path = [f"M{_MARGIN},{_CURVE_HEIGHT}"]
    for index, value in enumerate(values):
        path.append(f"V{_height(value, top):.1f}H{_across(index + 1, len(values)):.1f}")
    return f'<path d="{"".join(path)}V{_CURVE_HEIGHT}Z" fill="{colour}" fill-opacity="{opacity}"/>'


def _scale(top: int) -> str:
    lines = []
    for part in (0.0, 0.5, 1.0):
        y = _height(int(top * part), top)
        lines.append(
            f'<text x="{_MARGIN - 8}" y="{y + 4:.1f}" text-anchor="end">{size(int(top * part)) if part else 0}</text>'
            f'<line x1="{_MARGIN}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" '
            'stroke-opacity="0.2"/>'
        )
    return "".join(lines)


def _phase_strip(estimate: Estimate) -> Iterator[str]:
    """A band under the curve, coloured by phase; runs of one phase are one rectangle."""
    points = estimate.curve
    first = 0
    for index in range(1, len(points) + 1):
        if index < len(points) and points[index].phase == points[first].phase:
            continue
        if colour := _PHASE_COLOURS.get(points[first].phase):
            left, right = _across(first, len(points)), _across(index, len(points))
            yield (
                f'<rect x="{left:.1f}" y="{_CURVE_HEIGHT + 4}" width="{right - left:.1f}" height="7" '
                f'fill="{colour}"><title>{_text(points[first].phase)}</title></rect>'
            )
        first = index


def _steps(estimate: Estimate) -> Iterator[str]:
    for number, start in wording.step_starts(estimate.curve).items():
        x = _across(start, len(estimate.curve))
        yield (
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="8" y2="{_CURVE_HEIGHT + 24}" stroke="currentColor" '
            f'stroke-opacity="0.5" stroke-dasharray="3 3"/>'
            f'<text x="{x + 4:.1f}" y="{_CURVE_HEIGHT + 26}">step {number}</text>'
        )
