"""A Solution as a self-contained HTML page: the decision path as stacked bars, plans, reasons."""

from collections.abc import Iterator
from typing import Final

from tonnage.planner.describe import describe
from tonnage.planner.solution import Choice, Solution, Stage
from tonnage.report import markup
from tonnage.report.markup import key, table, text
from tonnage.report.palette import LOOKS
from tonnage.report.plans import (
    cost,
    describe_need,
    describe_point,
    facts,
    offered_peak,
    order,
    rates,
    saving,
    seconds,
    why_not,
)
from tonnage.report.wording import host_verdict
from tonnage.units import format_gib

_WIDTH: Final = 760
_ROW: Final = 40
_AMOUNTS: Final = 90  # right of the bars


def page(solution: Solution) -> str:
    """Return the page, which also contains the Solution as JSON data."""
    return markup.document(_title(solution), fragment(solution), solution.to_json())


def fragment(solution: Solution) -> str:
    """Return the report as one `<div>` with its own style, for a notebook cell or another page."""
    return markup.fragment(_parts(solution))


def _title(solution: Solution) -> str:
    return f"{solution.question['model']} on {solution.question['cluster']}"


def _parts(solution: Solution) -> Iterator[str]:
    yield f"<h3>{text(_title(solution))}</h3>"
    yield from _answer(solution)
    if solution.path:
        yield "<h3>From the baseline to the plan</h3>"
        yield _path(solution.path, solution.question["capacity_bytes"])
    if solution.plans:
        yield "<h3>Plans that fit, each run on the ghost</h3>"
        yield from _plans(solution)
        yield from _reasons(solution.plans[0])
    if solution.nearest is not None and solution.nearest.remedies:
        yield "<h3>What would make it fit</h3>"
        rows = [
            (text(one.what), format_gib(one.process_bytes), seconds(one.step_seconds))
            for one in solution.nearest.remedies
        ]
        yield table(("change", "peak", "step"), rows, numbers=(1, 2))
    if solution.frontier:
        yield "<h3>Memory against speed: nothing is faster with less</h3>"
        yield table(
            ("peak", "step", "tokens/s a GPU", "plan"),
            [
                (
                    describe_need(point),
                    seconds(point.step_seconds),
                    f"{point.tokens_per_second_per_gpu:,.0f}",
                    text(describe_point(point)),
                )
                for point in solution.frontier
            ],
            numbers=(0, 1, 2),
        )
    if solution.offers:
        yield "<h3>Faster if you say so</h3>"
        offered = [
            (text(one.what), seconds(one.step_seconds), offered_peak(one), text(one.why)) for one in solution.offers
        ]
        yield table(("say", "step", "peak", "why"), offered, numbers=(1,))
    if solution.refused:
        yield "<h3>Refused</h3>"
        rows_of = [(text(one.what), f'<span class="quiet">{text(one.why)}</span>') for one in solution.refused]
        yield table((), rows_of)
    yield f'<p class="quiet">{text(facts(solution))}</p>'


def _answer(solution: Solution) -> Iterator[str]:
    question = solution.question
    if solution.plans:
        best = solution.plans[0]
        if "found" in question:
            yield f"<p>{text(question['find'])}: {text(question['found'])}</p>"
        if "limit" in question:
            yield f"<p>{text(question['limit'])}</p>"
        yield f'<p class="answer fits">{text(describe(best.candidate, whole=True))}</p>'
        step, tokens, mfu, bound = rates(best.estimate.time)
        speed = f"{step} a step, {tokens} tokens/s a GPU, MFU {mfu}, bound by {bound}"
        if best.estimate.time["step_seconds"] is not None:
            yield f"<p>{text(speed)}</p>"
        if solution.unpriced is not None:
            yield f"<p>{text(order(solution))}</p>"
        yield f"<p>{format_gib(best.estimate.peak.process_bytes)} at the peak</p>"
        if (host := host_verdict(best.estimate)) is not None:
            yield f"<p>{text(host)}</p>"
    elif solution.nearest is not None:
        missing = format_gib(solution.nearest.missing_bytes)
        yield f'<p class="answer full">does not fit: {missing} missing, at least</p>'
        yield f"<p>least: {text(describe(solution.nearest.candidate))}</p>"
    else:
        yield f'<p class="answer full">{text(why_not(solution))}</p>'


def _plans(solution: Solution) -> Iterator[str]:
    rows, plans = [], solution.plans
    shown = [*plans, *([] if solution.barely is None else [solution.barely])]
    for choice in shown:
        *speed, bound = rates(choice.estimate.time)
        peak = format_gib(choice.estimate.peak.process_bytes)
        words = describe(choice.candidate, beside=plans[0].candidate)
        rows.append((text(words), *speed, peak, text(bound)))
    yield table(("plan", "step", "tokens/s a GPU", "MFU", "peak", "bound by"), rows, numbers=(1, 2, 3, 4))
    for choice in shown:
        if choice.note is not None:
            yield f"<p>{text(f'{describe(choice.candidate)}: {choice.note}')}</p>"


def _reasons(choice: Choice) -> Iterator[str]:
    if not choice.reasons:
        return
    yield "<h3>Why (each technique taken back on its own, run again)</h3>"
    rows = [
        (text(reason.technique), saving(reason.saves_bytes), cost(reason.costs_seconds), text(reason.why))
        for reason in choice.reasons
    ]
    yield table(("technique", "saves", "costs", "why"), rows, numbers=(1, 2))


def _path(stages: tuple[Stage, ...], capacity: int) -> str:
    """Return one stacked bar for each stage, scaled to the largest one, with a line at the card's capacity."""
    room = _WIDTH - _AMOUNTS
    most = max(capacity, *(stage.process_bytes for stage in stages))
    pieces = []
    for number, stage in enumerate(stages):
        top = number * _ROW
        pieces.append(f'<text x="0" y="{top + 12}">{text(("+ " if number else "") + stage.change)}</text>')
        left = 0.0
        for name, look in LOOKS.items():
            held = stage.by_category.get(name, 0)
            width = held * room / most
            if width > 0:
                pieces.append(
                    f'<rect x="{left:.1f}" y="{top + 16}" width="{width:.1f}" height="18" fill="{look.colour}">'
                    f"<title>{look.label}: {format_gib(held)}</title></rect>"
                )
            left += width
        words = format_gib(stage.process_bytes)
        weight = "400" if stage.fits else "700"
        pieces.append(f'<text x="{_WIDTH}" y="{top + 30}" text-anchor="end" font-weight="{weight}">{words}</text>')
    edge, height = capacity * room / most, len(stages) * _ROW
    pieces.append(f'<path d="M{edge:.1f} 0V{height}" stroke="currentColor" stroke-dasharray="3 3"/>')
    anchor = "end" if edge > room / 2 else "start"
    pieces.append(
        f'<text x="{edge:.1f}" y="{height + 12}" text-anchor="{anchor}">the card: {format_gib(capacity)}</text>'
    )
    seen = [look for name, look in LOOKS.items() if any(stage.by_category.get(name) for stage in stages)]
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height + 18}" role="img" aria-label="Memory after each technique">'
        f"{''.join(pieces)}</svg>\n<p>{' &nbsp; '.join(key(look.label, look.colour) for look in seen)}</p>"
    )
