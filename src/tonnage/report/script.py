"""A ScriptPlan as text for a terminal: the script before and after the changes, the changes, and the command line."""

from collections.abc import Iterator
from typing import Any, Final

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tonnage.estimates.estimate import Estimate, Host
from tonnage.planner.describe import describe
from tonnage.planner.solution import Refused
from tonnage.report.canvas import BAD, GOOD, LEAST_OF_PLANS, TIGHT, Canvas, Part, draw, text, title
from tonnage.report.plans import cost, saving, seconds
from tonnage.script.planning import ScriptPlan
from tonnage.script.setting_changes import Change
from tonnage.units import format_gib, pluralise

VERDICTS: Final = {
    "found": ("FITS", GOOD),
    "too_large": ("DOES NOT FIT", BAD),
    "unsupported": ("NOT POSSIBLE", BAD),
    "unknown": ("NOT PLANNED", TIGHT),
}


def render(script_plan: ScriptPlan, *, width: int = 100, colour: bool = False, unicode: bool = True) -> str:
    """Return the report with this width (at least 60, at most 200 columns) and a final newline."""
    canvas = Canvas.of(width=width, colour=colour, unicode=unicode, least=LEAST_OF_PLANS)
    return draw(_parts(script_plan), canvas)


def _parts(script_plan: ScriptPlan) -> Iterator[Part]:
    yield _headline(script_plan)
    yield title("The script, run")
    yield Padding(_beside(script_plan), (0, 0, 0, 2))
    yield from _changes(script_plan)
    yield from _line(script_plan)
    yield from _listed("Tried, and not advised", script_plan.failed)
    yield from _unexpressed(script_plan)
    yield from _notes(script_plan)


def _headline(script_plan: ScriptPlan) -> Table:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(no_wrap=True)
    rows.add_column()
    word, style = VERDICTS[script_plan.status]
    if script_plan.status == "found" and not script_plan.has_room(script_plan.answer):
        word, style = "FITS, BARELY", TIGHT
    rows.add_row(Text(word, style=style), text(describe_verdict(script_plan), "bold"))
    rows.add_row("", text(script_plan.seen))
    if script_plan.now is not None:
        rows.add_row("", text(script_plan.now.words))
    if script_plan.by_trial:
        rows.add_row("", text(f"by trying, without a plan: {script_plan.why_not}"))
    return rows


def describe_verdict(script_plan: ScriptPlan) -> str:
    """Return the answer behind FITS or DOES NOT FIT, in a few words."""
    if script_plan.why_not is not None and not script_plan.by_trial:
        return script_plan.why_not
    if not script_plan.changes:
        return "as it is: nothing to change" if script_plan.status == "found" else _left(script_plan)
    if script_plan.status != "found":
        return "whatever was tried"
    return f"with {pluralise(len(script_plan.changes), 'change')}" + (
        "" if script_plan.before.fits else "; as it is, it does not"
    )


def _left(script_plan: ScriptPlan) -> str:
    """Return the reason why there is no plan."""
    found = script_plan.solution
    if found is not None and found.nearest is not None:
        near = found.nearest
        return (
            f"by none of its settings: with {describe(near.candidate)} it needs "
            f"{format_gib(near.needed_bytes)}, which is "
            f"{format_gib(near.missing_bytes)} too much; a smaller batch or shorter sequences would need less"
        )
    return found.refused[0].why if found is not None and found.refused else "no combination is left"


def _beside(script_plan: ScriptPlan) -> Table:
    """Return a table with one column for each of the two runs."""
    runs = [script_plan.before] + ([script_plan.after.estimate] if script_plan.after is not None else [])
    rows = Table.grid(padding=(0, 3))
    rows.add_column()
    for heading in ("as it is", "with the changes")[: len(runs)]:
        rows.add_column(header=Text(heading, style="dim"), justify="right", no_wrap=True)
    rows.show_header = True
    rows.add_row("fits", *(_fits(run) for run in runs))
    rows.add_row("host memory", *(Text(format_host(run.host), style="" if run.host.fits else BAD) for run in runs))
    rows.add_row("peak of the process", *(format_reached(run, run.peak.process_bytes) for run in runs))
    rows.add_row("allocated", *(format_reached(run, run.peak.allocated_bytes) for run in runs))
    free = (run.cluster["capacity_bytes"] - run.peak.process_bytes for run in runs)
    rows.add_row(
        "free", *(format_gib(max(left, 0)) if run.fits_card else "-" for run, left in zip(runs, free, strict=True))
    )
    if any(script_plan.step_seconds):
        rows.add_row("a step (time model)", *(seconds(value) for value in script_plan.step_seconds[: len(runs)]))
    return rows


def format_reached(run: Estimate, most: int) -> str:
    """Return a peak; `>` marks the last value of a run that ended without memory."""
    return format_gib(most) if run.fits_card else f"> {format_gib(most)}"


def format_host(host: Host) -> str:
    """Return what a machine needs of host memory, beside what it has if it does not fit."""
    needed = "-" if host.machine_bytes is None else format_gib(host.machine_bytes)
    return needed if host.fits else f"{needed} of {format_gib(host.limit_bytes or 0)}"


def _fits(run: Estimate) -> Text:
    return Text("yes", style=GOOD) if run.fits else Text("no", style=BAD)


def _changes(script_plan: ScriptPlan) -> Iterator[Part]:
    if not script_plan.changes:
        return
    yield title("What to change" if script_plan.status != "too_large" else "What would change, had it fitted")
    yield _table("setting", [(_settings(change), change) for change in script_plan.changes])


def _unexpressed(script_plan: ScriptPlan) -> Iterator[Part]:
    if not script_plan.unexpressed:
        return
    yield title("Techniques that it has no setting for (their figures: the same plan in a loop of tonnage's own)")
    yield _table("technique", [(text(change.technique), change) for change in script_plan.unexpressed])


def _table(first: str, found: list[tuple[Text, Change]]) -> Padding:
    rows = Table.grid(padding=(0, 2))
    for heading in (first, "saves", "costs", "why"):
        justify: Any = "right" if heading in ("saves", "costs") else "left"
        rows.add_column(
            header=Text(heading, style="dim"), justify=justify, no_wrap=heading in ("saves", "costs"), overflow="fold"
        )
    rows.show_header = True
    for words, change in found:
        rows.add_row(words, saving(change.saves_bytes), cost(change.costs_seconds), text(change.why))
    return Padding(rows, (0, 0, 0, 2))


def _settings(change: Change) -> Text:
    return Text("\n").join(text(str(setting), "bold") for setting in change.settings)


def _line(script_plan: ScriptPlan) -> Iterator[Part]:
    if script_plan.after is None:
        return
    yield title("As it was run")
    yield Padding(text(script_plan.after.line), (0, 0, 0, 2))
    if script_plan.after.arguments:
        yield Padding(text("and, in its own code (put there in this run):", "dim"), (0, 0, 0, 2))
    for words in script_plan.after.in_code:
        yield Padding(text(words), (0, 0, 0, 4))
    for words in script_plan.after.not_taken:
        yield Padding(text(words, TIGHT), (0, 0, 0, 2))


def _listed(heading: str, found: tuple[Refused, ...]) -> Iterator[Part]:
    if not found:
        return
    yield title(heading)
    rows = Table.grid(padding=(0, 2))
    rows.add_column()
    rows.add_column()
    for refused in found:
        rows.add_row(text(refused.what), text(refused.why, "dim"))
    yield Padding(rows, (0, 0, 0, 2))


def _notes(script_plan: ScriptPlan) -> Iterator[Part]:
    notes = list_notes(script_plan)
    for note in notes:
        yield Padding(text(note, "dim"), (1 if note == notes[0] else 0, 0, 0, 0))


def list_notes(script_plan: ScriptPlan) -> list[str]:
    """Return the sentences below the tables."""
    notes = [] if script_plan.now is None else list(script_plan.now.notes)
    notes += list(script_plan.before.notes)
    if script_plan.changes and script_plan.now is not None:
        notes.append("What a change saves and costs: the plan with it, less the plan as the script has it now.")
        notes.append("Each step has as many sequences as before.")
        if script_plan.solution is not None and script_plan.solution.unpriced is not None:
            notes.append(script_plan.solution.unpriced)
    return notes
