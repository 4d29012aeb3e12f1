"""An Estimate as HTML: a fragment for notebooks, and a self-contained page.

There are no scripts, no fonts and no requests; pictures are inline SVG.  All text from values is escaped, because a
saved estimate may come from an untrusted source.
"""

from collections.abc import Iterator
from typing import Final

from tonnage.advice.suggestions_not_run import suggest
from tonnage.estimates.estimate import Estimate, PhasePeak, capacity_bytes, shown_peak
from tonnage.report import markup, wording
from tonnage.report.engine_words import serving_rows
from tonnage.report.markup import key, table, text
from tonnage.units import format_gib, format_size

_WIDTH: Final = 760
_BAR_HEIGHT: Final = 34
_CURVE_HEIGHT: Final = 170
_MARGIN: Final = 72  # left of the curve, for its scale

_ALLOCATED: Final = "#0072B2"
_RESERVED: Final = "#999999"
_PHASE_COLOURS: Final = {
    "load": "#8C6D46",
    "forward": "#56B4E9",
    "backward": "#D55E00",
    "recompute": "#E69F00",
    "optimizer": "#009E73",
}


def fragment(estimate: Estimate) -> str:
    """Return the report as one `<div>` with its own style, for a notebook cell or another page."""
    return markup.fragment(list_parts(estimate))


def page(estimate: Estimate) -> str:
    """Return the report as a whole document, which also contains the Estimate as JSON data."""
    title = f"{wording.headline(estimate)}: {wording.subject(estimate)}"
    return markup.document(title, fragment(estimate), estimate.to_json())


def list_parts(estimate: Estimate) -> Iterator[str]:
    """Yield the parts of the report, from the verdict to the sources."""
    yield _verdict(estimate)
    yield from _serving(estimate)
    yield _bar(estimate)
    yield _legend(estimate)
    yield from _out_of_memory(estimate)
    yield from _advice(estimate)
    yield from _curve(estimate)
    yield from _phases(estimate)
    yield from _ranks(estimate)
    yield _facts(estimate)


# ---- text ------------------------------------------------------------------------------------------------------


def _verdict(estimate: Estimate) -> str:
    kind = "full" if not estimate.fits else "tight" if estimate.is_tight else "fits"
    question = f"{wording.subject(estimate)} on {wording.card(estimate)}"
    notes = "".join(f"<p>Note: {text(note)}</p>" for note in estimate.notes)
    if host := wording.host_verdict(estimate):
        kind_of_host = "fits" if estimate.host.fits else "full"
        notes = f'<p class="{kind_of_host}">{text(host)}</p>{notes}'
    return (
        f'<p class="answer"><span class="{kind}">{wording.headline(estimate)}</span> {text(wording.need(estimate))}'
        f'</p>\n<p>{text(question)}</p>\n<p class="quiet">{text(wording.choices(estimate))}</p>{notes}'
    )


def _serving(estimate: Estimate) -> Iterator[str]:
    if estimate.serving is not None:
        yield "<h3>The engine, on each GPU</h3>"
        yield table((), [tuple(map(text, row)) for row in serving_rows(estimate.serving)])


def _out_of_memory(estimate: Estimate) -> Iterator[str]:
    if estimate.oom is not None:
        oom = estimate.oom
        moment = wording.moment(oom.step, oom.phase, oom.layer)
        yield f"<h3>Out of memory in {text(moment)}: PyTorch's message</h3>"
        yield f"<p>{text(' '.join(oom.message.split()))}</p>"
        if oom.stack:
            yield "<pre>" + "\n".join(text(frame) for frame in wording.frames(oom.stack)) + "</pre>"
    if not wording.has_own_advice(estimate) and (suggestions := suggest(estimate)):
        yield f"<h3>{wording.ADVICE_TITLE}</h3>"
        yield table((), [(f"<code>{text(item.what)}</code>", text(item.why)) for item in suggestions])


def _advice(estimate: Estimate) -> Iterator[str]:
    if not estimate.advice:
        return
    yield f"<h3>{wording.advice_title(estimate)}</h3>"
    rows = [(f"<code>{text(change)}</code>", *map(text, cells)) for change, *cells in wording.advice_rows(estimate)]
    yield table(wording.advice_headings(estimate), rows, numbers=(2, 3, 4))
    yield f"<p>{text(wording.advice_note(estimate))} <code>{text(estimate.advice[0].command)}</code></p>"


def _phases(estimate: Estimate) -> Iterator[str]:
    if not estimate.phases:
        return
    capacity, peak = capacity_bytes(estimate), estimate.peak
    whole = PhasePeak(name="whole run", allocated_bytes=peak.allocated_bytes, reserved_bytes=peak.reserved_bytes)
    rows = [
        (
            text(phase.name),
            wording.amount(phase.allocated_bytes),
            wording.amount(phase.reserved_bytes),
            wording.percent(phase.reserved_bytes, capacity) if capacity else "-",
        )
        for phase in (*estimate.phases, *wording.first_and_later(estimate), whole)
    ]
    yield "<h3>Peak of each phase</h3>"
    yield table(("phase", "allocated", "reserved", "reserved of the card"), rows, numbers=(1, 2, 3))


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
        yield table(("rank", "fits", "allocated", "reserved", "process"), rows, numbers=(2, 3, 4))


def _facts(estimate: Estimate) -> str:
    rows = [
        (f'<span class="quiet">{name}</span>', "<br>".join(map(text, lines)))
        for name, lines in wording.facts(estimate)
    ]
    return "<h3>Sources and assumptions</h3>" + table((), rows)


# ---- the stacked bar -------------------------------------------------------------------------------------------


def _bar(estimate: Estimate) -> str:
    shares = wording.shares(estimate)
    whole = max(sum(share.bytes for share in shares) + wording.free_bytes(estimate), 1)
    pieces, left = [], 0.0
    for share in shares:
        width = share.bytes * _WIDTH / whole
        label = f"{share.look.label}: {format_gib(share.bytes)}"
        inside = (
            f'<text x="{left + width / 2:.1f}" y="{_BAR_HEIGHT / 2 + 4:.0f}" text-anchor="middle" '
            f'style="fill: #fff">{format_gib(share.bytes)}</text>'
            if width > 62
            else ""
        )
        pieces.append(
            f'<g><title>{text(label)}</title><rect x="{left:.2f}" y="0" width="{width:.2f}" height="{_BAR_HEIGHT}" '
            f'fill="{share.look.colour}"/>{inside}</g>'
        )
        left += width
    frame = (
        f'<rect x="0.5" y="0.5" width="{_WIDTH - 1}" height="{_BAR_HEIGHT - 1}" fill="none" stroke="currentColor" '
        'stroke-opacity="0.45"/>'
    )
    capacity = capacity_bytes(estimate)
    peak = shown_peak(estimate)
    moment = wording.moment(peak.step, peak.phase, peak.layer)
    heading = "The whole step, on a card without a limit" if estimate.needed else "At the peak"
    if capacity and peak.process_bytes > capacity:
        x = capacity * _WIDTH / whole
        frame += (
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{_BAR_HEIGHT}" stroke="#d00" stroke-width="3">'
            f"<title>the card ends here</title></line>"
        )
    aside = f' <span class="quiet">on a card of {format_gib(capacity)}</span>' if capacity else ""
    return (
        f"<h3>{heading}: rank {estimate.rank}, {text(moment)}{aside}</h3>\n"
        f'<svg viewBox="0 0 {_WIDTH} {_BAR_HEIGHT}" role="img" aria-label="Memory by category at the peak">'
        f"{''.join(pieces)}{frame}</svg>"
    )


def _legend(estimate: Estimate) -> str:
    whole = capacity_bytes(estimate) or estimate.peak.process_bytes
    rows = [
        (
            f'<span class="swatch" style="background: {share.look.colour}"></span>',
            text(share.look.label),
            wording.amount(share.bytes),
            wording.percent(share.bytes, whole),
            f'<span class="quiet">{text(share.look.meaning)}</span>',
        )
        for share in wording.shares(estimate)
    ]
    if capacity_bytes(estimate):
        free = wording.free_bytes(estimate)
        rows.append(('<span class="swatch none"></span>', "free", format_gib(free), wording.percent(free, whole), ""))
    return table((), rows, numbers=(2, 3))


# ---- the timeline ----------------------------------------------------------------------------------------------


def _curve(estimate: Estimate) -> Iterator[str]:
    points = estimate.curve
    top = max((max(point.reserved_bytes, point.allocated_bytes) for point in points), default=0)
    if len(points) < 2 or top <= 0:
        return
    reserved = _area([point.reserved_bytes for point in points], top, _RESERVED, 0.45)
    allocated = _area([point.allocated_bytes for point in points], top, _ALLOCATED, 1)
    yield f'<h3>Memory through the steps <span class="quiet">{wording.AXIS}</span></h3>'
    yield (
        f'<svg viewBox="0 0 {_WIDTH} {_CURVE_HEIGHT + 40}" role="img" aria-label="Allocated and reserved memory">'
        f"{_scale(top)}{reserved}{allocated}{''.join(_phase_strip(estimate))}{''.join(_steps(estimate))}</svg>"
    )
    seen = dict.fromkeys(point.phase for point in points if point.phase in _PHASE_COLOURS)
    keys = [("allocated", _ALLOCATED), ("reserved", _RESERVED), *((name, _PHASE_COLOURS[name]) for name in seen)]
    yield f"<p>{' &nbsp; '.join(key(name, colour) for name, colour in keys)}</p>"


def _across(index: float, count: int) -> float:
    return _MARGIN + index * (_WIDTH - _MARGIN) / count


def _height(value_bytes: int, top: int) -> float:
    return 8 + (_CURVE_HEIGHT - 8) * (1 - value_bytes / top)


def _area(values: list[int], top: int, colour: str, opacity: float) -> str:
    """Return a filled staircase, in which each moment keeps its value until the next."""
    path = [f"M{_MARGIN},{_CURVE_HEIGHT}"]
    for index, value in enumerate(values):
        path.append(f"V{_height(value, top):.1f}H{_across(index + 1, len(values)):.1f}")
    return f'<path d="{"".join(path)}V{_CURVE_HEIGHT}Z" fill="{colour}" fill-opacity="{opacity}"/>'


def _scale(top: int) -> str:
    lines = []
    for part in (0.0, 0.5, 1.0):
        y = _height(int(top * part), top)
        lines.append(
            f'<text x="{_MARGIN - 8}" y="{y + 4:.1f}" text-anchor="end">'
            f"{format_size(int(top * part)) if part else 0}</text>"
            f'<line x1="{_MARGIN}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" '
            'stroke-opacity="0.2"/>'
        )
    return "".join(lines)


def _phase_strip(estimate: Estimate) -> Iterator[str]:
    """Yield the rectangles of a band under the curve, one for each run of one phase."""
    points = estimate.curve
    first = 0
    for index in range(1, len(points) + 1):
        if index < len(points) and points[index].phase == points[first].phase:
            continue
        if colour := _PHASE_COLOURS.get(points[first].phase):
            left, right = _across(first, len(points)), _across(index, len(points))
            yield (
                f'<rect x="{left:.1f}" y="{_CURVE_HEIGHT + 4}" width="{right - left:.1f}" height="7" '
                f'fill="{colour}"><title>{text(points[first].phase)}</title></rect>'
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
