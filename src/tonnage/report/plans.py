"""A Solution as text for a terminal: the best plan, alternatives, reasons, the path to the plan, refused options."""

import textwrap
from collections.abc import Iterator
from typing import Any, Final

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tonnage.estimates.training import describe_training
from tonnage.options import spell_option
from tonnage.planner.describe import describe
from tonnage.planner.solution import Choice, Nearest, Offer, Point, Remedy, Solution, Stage
from tonnage.planner.trial_run import count_micro_batches
from tonnage.planner.unpriced import RANKED
from tonnage.report.canvas import BAD, GOOD, LEAST_OF_PLANS, Canvas, Part, draw, text, title
from tonnage.report.palette import FREE_GLYPH, FREE_LETTER, LOOKS
from tonnage.report.wording import host_verdict, longest_text, samples
from tonnage.units import format_gib, pluralise

_REFUSED_ROWS: Final = 8
_WIDTH_FOR_ALL_COLUMNS: Final = 90  # columns of the terminal from which a plan's row has all its cells
_NARROW_HEADINGS: Final = ("", "plan", "step", "peak")
_HEADLINES: Final = {
    "too_large": "DOES NOT FIT",
    "unsupported": "NOT POSSIBLE",
    "unknown": "UNKNOWN",
}


def render(solution: Solution, *, width: int = 100, colour: bool = False, unicode: bool = True) -> str:
    """Return the report with this width (at least 60, at most 200 columns) and a final newline."""
    canvas = Canvas.of(width=width, colour=colour, unicode=unicode, least=LEAST_OF_PLANS)
    return draw(_parts(solution, canvas), canvas)


def _parts(solution: Solution, canvas: Canvas) -> Iterator[Part]:
    yield _headline(solution)
    yield from _plans(solution, canvas)
    if solution.plans:
        yield from _reasons(solution.plans[0])
    yield from _path(solution, canvas)
    yield from _frontier(solution)
    if solution.nearest is not None:
        yield from _nearest(solution.nearest)
    yield from _offers(solution, canvas)
    yield from _refused(solution)
    if solution.status != "unsupported":
        yield Padding(text(facts(solution), "dim"), (1, 0, 0, 0))


def why_not(solution: Solution) -> str:
    """Return the first reason against all plans, where none can be run."""
    if not solution.refused:
        return "no combination is left"
    first = solution.refused[0]
    return first.why if first.what == "all" else f"{spell_option(first.what)}: {first.why}"


def _headline(solution: Solution) -> Table:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(no_wrap=True)
    rows.add_column()
    question = solution.question
    asked = f"{question['model']} on {question['cluster']}"
    batch = _batch(question)
    if solution.plans:
        best = solution.plans[0]
        if "found" in question:
            rows.add_row(Text("FOUND", style=GOOD), text(f"{question['find']}: {question['found']}", "bold"))
            if "limit" in question:
                rows.add_row("", text(question["limit"]))
        rows.add_row(Text("FITS", style=GOOD), text(describe(best.candidate, whole=True), "bold"))
        rows.add_row("", text(f"{asked}; {batch}"))
        if best.estimate.time["step_seconds"] is not None:
            rows.add_row("", text(_speed(best)))
        if (training := describe_training(best.estimate.time)) is not None:
            rows.add_row("", text(training))
        if solution.unpriced is not None:
            rows.add_row("", text(order(solution)))
        if (host := host_verdict(best.estimate)) is not None:
            rows.add_row("", text(host))
    elif solution.nearest is not None:
        missing = format_gib(solution.nearest.missing_bytes)
        rows.add_row(Text(_HEADLINES["too_large"], style=BAD), text(f"{missing} missing, at least", "bold"))
        rows.add_row("", text(f"{asked}; {batch}"))
    else:
        why = text(why_not(solution), "bold")
        rows.add_row(Text(_HEADLINES.get(solution.status, solution.status), style=BAD), why)
        rows.add_row("", text(f"{asked}; {batch}"))
    return rows


def _batch(question: dict[str, Any]) -> str:
    """Return the batch of one step; only its size for images, whose tokens the network makes, and for factories."""
    sequences, tokens = question["sequences"], question["job"]["seq_len"]
    if not question.get("words", True):
        return f"{samples(sequences)} a step"
    if question["job"].get("lengths"):
        return f"{pluralise(sequences, 'sequence')} a step of {longest_text(question['job'], tokens)}"
    return f"{sequences * tokens:,} tokens a step: {sequences:,} x {tokens:,}"


def order(solution: Solution) -> str:
    """Return the ranking of plans without a time model, and the origin of the seconds that shown plans may have."""
    counted = any(one.estimate.time["step_seconds"] is not None for one in solution.plans)
    if counted:
        return (
            f"found without seconds: {RANKED}; those of the plans that are shown are of their operations, counted on "
            f"the ghost. {solution.unpriced}"
        )
    return f"ranked without seconds: {RANKED}. {solution.unpriced}"


def _speed(choice: Choice) -> str:
    time = choice.estimate.time
    interval = f"{seconds(time.get('low_seconds'))} to {seconds(time.get('high_seconds'))}"
    return (
        f"{seconds(time['step_seconds'])} a step ({interval}), {time['tokens_per_second_per_gpu']:,.0f} tokens/s "
        f"a GPU, MFU {time['mfu']:.0%}, bound by {time['bound_by']}"
    )


def seconds(value: float | None) -> str:
    """Return seconds as `0.86 s` or `12.4 ms`; a dash for None."""
    if value is None:
        return "-"
    return f"{value:.3g} s" if value >= 0.1 else f"{value * 1e3:.3g} ms"


def _plans(solution: Solution, canvas: Canvas) -> Iterator[Part]:
    if not solution.plans:
        return
    yield title("Plans that fit, each run on the ghost")
    rows = Table.grid(padding=(0, 2))
    headings = ("", "plan", "step", "tokens/s a GPU", "MFU", "peak", "free", "bound by")
    has_all_columns = canvas.width >= _WIDTH_FOR_ALL_COLUMNS
    shown = [index for index, heading in enumerate(headings) if has_all_columns or heading in _NARROW_HEADINGS]
    for heading in (headings[index] for index in shown):
        justify: Any = "left" if heading in ("plan", "bound by") else "right"
        rows.add_column(
            header=Text(heading, style="dim"), justify=justify, no_wrap=heading != "plan", overflow="fold"
        )
    rows.show_header = True
    shown_plans = [(str(number), choice) for number, choice in enumerate(solution.plans, 1)]
    if solution.barely is not None:
        shown_plans.append(("-", solution.barely))
    for number, choice in shown_plans:
        time, peak = choice.estimate.time, choice.estimate.peak.process_bytes
        cells = (
            number,
            text(describe(choice.candidate, beside=solution.plans[0].candidate), "bold" if number == "1" else ""),
            *rates(time)[:3],
            format_gib(peak),
            format_gib(max(solution.question["capacity_bytes"] - peak, 0)),
            rates(time)[3],
        )
        rows.add_row(*(cells[index] for index in shown))
    yield Padding(rows, (0, 0, 0, 2))
    for number, choice in shown_plans:
        if choice.note is not None:
            yield Padding(text(f"{number}  {choice.note}"), (0, 0, 0, 2))


def rates(time: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return an estimate's step time, tokens a second, MFU and bound; dashes where no seconds are known."""
    if time["step_seconds"] is None:
        return ("-",) * 4
    return (
        seconds(time["step_seconds"]),
        f"{time['tokens_per_second_per_gpu']:,.0f}",
        f"{time['mfu']:.0%}",
        str(time["bound_by"]),
    )


def _reasons(choice: Choice) -> Iterator[Part]:
    if not choice.reasons:
        return
    yield title("Why (each technique taken back on its own, run again)")
    rows = Table.grid(padding=(0, 2))
    for heading in ("technique", "saves", "costs", "why"):
        justify: Any = "right" if heading in ("saves", "costs") else "left"
        rows.add_column(
            header=Text(heading, style="dim"), justify=justify, no_wrap=heading in ("saves", "costs"), overflow="fold"
        )
    rows.show_header = True
    for reason in choice.reasons:
        rows.add_row(
            text(reason.technique, "bold"),
            saving(reason.saves_bytes),
            cost(reason.costs_seconds),
            text(reason.why),
        )
    yield Padding(rows, (0, 0, 0, 2))


def saving(saved_bytes: int | None) -> str:
    """Return the bytes that a technique saves, which can be negative; a dash where it was not run."""
    if saved_bytes is None:
        return "-"
    words = format_gib(abs(saved_bytes))
    return f"-{words}" if saved_bytes < 0 and words != format_gib(0) else words


def cost(costs: float | None) -> str:
    """Return the seconds that a technique costs, with their sign; a dash where they are unknown."""
    if costs is None:
        return "-"
    if abs(costs) < 0.5e-3:
        return "0"
    return f"{'+' if costs > 0 else '-'}{seconds(abs(costs))}"


def _path(solution: Solution, canvas: Canvas) -> Iterator[Part]:
    if not solution.path:
        return
    capacity = solution.question["capacity_bytes"]
    some = "" if all(stage.whole for stage in solution.path) else "; ~ from runs of a few layers"
    if some and solution.plans[0].candidate.plan.attention == "flex":
        some += ", flash attention for flex"
    yield title("From the baseline to the plan", text(f"the card has {format_gib(capacity)}{some}", "dim"), canvas)
    labels = [("  + " if number else "") + stage.change for number, stage in enumerate(solution.path)]
    shown = min(max(map(len, labels)), canvas.width // 3)
    room = max(20, canvas.width - shown - 17)
    most = max(stage.process_bytes for stage in solution.path)
    for label, stage in zip(labels, solution.path, strict=True):
        first, *rest = textwrap.wrap(label, shown, subsequent_indent="    ", break_on_hyphens=False)
        line = text(first.ljust(shown))
        amount = f"{'' if stage.whole else '~'}{format_gib(stage.process_bytes)}"
        line.append(f" {amount:>12} ", style=GOOD if stage.fits else BAD)
        line.append_text(_bar(stage, most, capacity, room, canvas))
        yield line
        yield from map(text, rest)
    yield _legend(solution.path, canvas)


def _bar(stage: Stage, most: int, capacity: int, room: int, canvas: Canvas) -> Text:
    """Return the bar of a stage's categories, scaled to the largest stage, with a mark at the card's capacity."""
    cells: list[tuple[str, str]] = []
    seen = 0
    for name, look in LOOKS.items():
        seen += stage.by_category.get(name, 0)
        glyph = look.letter if not canvas.unicode else "█" if canvas.colour else look.glyph
        cells += [(glyph, look.colour)] * (round(seen * room / most) - len(cells))
    cells += [(FREE_GLYPH if canvas.unicode else FREE_LETTER, "dim")] * (room - len(cells))
    edge = round(capacity * room / most)
    if edge < room:
        cells[edge] = ("│" if canvas.unicode else "|", "bold")
    bar = Text()
    for glyph, style in cells[:room]:
        bar.append(glyph, style=style)
    return bar


def _legend(stages: tuple[Stage, ...], canvas: Canvas) -> Text:
    line = Text("  ")
    for name, look in LOOKS.items():
        if any(stage.by_category.get(name) for stage in stages):
            glyph = look.letter if not canvas.unicode else "█" if canvas.colour else look.glyph
            line.append(glyph, style=look.colour)
            line.append(f" {look.label}  ", style="dim")
    line.append("│" if canvas.unicode else "|", style="bold")
    line.append(" the card", style="dim")
    return line


def _frontier(solution: Solution) -> Iterator[Part]:
    if not solution.frontier:
        return
    yield title("Memory against speed: nothing is faster with less")
    rows = Table.grid(padding=(0, 2))
    for justify in ("right", "right", "right", "left"):
        rows.add_column(justify=justify, no_wrap=justify == "right")  # type: ignore[arg-type]
    for point in solution.frontier:
        rows.add_row(describe_need(point), seconds(point.step_seconds), *_rate(point))
    yield Padding(rows, (0, 0, 0, 2))


def describe_need(point: Point) -> str:
    """Return the memory that a plan of the frontier needs; `~` marks a probe of a few layers."""
    return format_gib(point.process_bytes) if point.whole else f"~{format_gib(point.process_bytes)}"


def describe_point(point: Point) -> str:
    """Return a plan of the frontier in words, with a note if it does not fit."""
    return describe(point.candidate) + ("" if point.fits else " (more than the card has)")


def _rate(point: Point) -> tuple[str, Text]:
    return f"{point.tokens_per_second_per_gpu:,.0f} tokens/s", text(describe_point(point))


def _nearest(nearest: Nearest) -> Iterator[Part]:
    yield title("The plan that needs least")
    yield Padding(text(f"{describe(nearest.candidate)}: {format_gib(nearest.needed_bytes)}"), (0, 0, 0, 2))
    if not nearest.remedies:
        return
    yield title("What would make it fit")
    rows = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "right", "right"):
        rows.add_column(justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for remedy in nearest.remedies:
        rows.add_row(*_remedy(remedy))
    yield Padding(rows, (0, 0, 0, 2))


def _remedy(remedy: Remedy) -> tuple[Text, str, str, str]:
    rate = remedy.tokens_per_second_per_gpu
    return (
        text(remedy.what, "bold"),
        format_gib(remedy.process_bytes),
        f"{seconds(remedy.step_seconds)} a step",
        "" if rate is None else f"{rate:,.0f} tokens/s a GPU",
    )


def _offers(solution: Solution, canvas: Canvas) -> Iterator[Part]:
    if not solution.offers:
        return
    yield title("Faster if you say so", text("* changes what is trained", "dim"), canvas)
    rows = Table.grid(padding=(0, 2))
    for wraps in (False, False, True):
        rows.add_column(no_wrap=not wraps)
    for offer in solution.offers:
        words = text(offer.what + " *" * offer.changes_mathematics, "bold")
        why = text(f"{offered_peak(offer)}; {offer.why}", "dim")
        rows.add_row(words, f"{seconds(offer.step_seconds)} a step", why)
    yield Padding(rows, (0, 0, 0, 2))


def offered_peak(offer: Offer) -> str:
    """Return the peak with what is offered."""
    return "priced, not run" if offer.process_bytes is None else format_gib(offer.process_bytes)


def _refused(solution: Solution) -> Iterator[Part]:
    if not solution.refused or (not solution.plans and solution.nearest is None):
        return
    yield title("Refused")
    rows = Table.grid(padding=(0, 2))
    rows.add_column(ratio=3)
    rows.add_column(ratio=2)
    for refused in solution.refused[:_REFUSED_ROWS]:
        rows.add_row(text(refused.what), text(refused.why, "dim"))
    yield Padding(rows, (0, 0, 0, 2))
    if len(solution.refused) > _REFUSED_ROWS:
        yield Padding(text(f"and {len(solution.refused) - _REFUSED_ROWS} more (--json has all)", "dim"), (0, 0, 0, 2))


def facts(solution: Solution) -> str:
    """Return the origin of the answer: the searched combinations, the executed part of a step, the models used."""
    counts = solution.looked_at or {}
    words = []
    if counts:
        words.append(
            f"{pluralise(counts.get('priced', 0), 'combination')} priced, "
            f"{counts.get('below_bound', 0):,} need more than the card by any count, "
            f"{counts.get('ruled_out', 0):,} need no less than one that failed, "
            f"{counts.get('run', 0):,} run on the ghost"
        )
    if solution.plans:
        best = solution.plans[0].candidate
        run = count_micro_batches(best)
        if run < best.job.grad_accum:
            words.append(
                f"{run} of a step's {best.job.grad_accum} micro-batches were run: the others are like the last"
            )
        made, _, _ = solution.plans[0].estimate.coverage.run[0].partition(", of torch")
        words.append(f"of the best plan {made}")
    headroom = solution.question["headroom"]
    said = "memory is the ghost's" if solution.unpriced else "seconds are the time model's, memory is the ghost's"
    words.append(f"{headroom:.0%} of the card stays free (--headroom); {said}")
    return "; ".join(words) + "."
