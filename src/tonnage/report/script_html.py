"""A ScriptPlan as a self-contained HTML page: the script before and after the changes, the changes, the last run."""

from collections.abc import Iterator, Sequence

from tonnage.report import html, markup
from tonnage.report.markup import table, text
from tonnage.report.plans import cost, saving, seconds
from tonnage.report.script import VERDICTS, describe_verdict, format_host, format_reached, list_notes
from tonnage.script.planning import ScriptPlan
from tonnage.script.setting_changes import Change
from tonnage.units import format_gib


def page(script_plan: ScriptPlan) -> str:
    """Return the page, which also contains the ScriptPlan as JSON data."""
    word, _ = VERDICTS[script_plan.status]
    title = f"{word}: {' '.join(script_plan.command)}"
    return markup.document(title, markup.fragment(_parts(script_plan)), script_plan.to_json())


def _parts(script_plan: ScriptPlan) -> Iterator[str]:
    word, _ = VERDICTS[script_plan.status]
    kind = {"found": "fits", "unknown": "tight"}.get(script_plan.status, "full")
    yield f'<p class="answer"><span class="{kind}">{word}</span> {text(describe_verdict(script_plan))}</p>'
    yield f"<p>{text(' '.join(script_plan.command))}</p>\n<p>{text(script_plan.seen)}</p>"
    if script_plan.now is not None:
        yield f'<p class="quiet">{text(script_plan.now.words)}</p>'
    if script_plan.by_trial:
        yield f"<p>by trying, without a plan: {text(str(script_plan.why_not))}</p>"
    yield "<h3>The script, run</h3>"
    yield _beside(script_plan)
    if script_plan.changes:
        what = "What would change, had it fitted" if script_plan.status == "too_large" else "What to change"
        yield f"<h3>{what}</h3>"
        yield _changes(
            "setting", [("<br>".join(map(_code, map(str, item.settings))), item) for item in script_plan.changes]
        )
    yield from _line(script_plan)
    if script_plan.failed:
        yield "<h3>Tried, and not advised</h3>"
        yield table((), [(text(refused.what), text(refused.why)) for refused in script_plan.failed])
    if script_plan.unexpressed:
        yield "<h3>Techniques that it has no setting for (the same plan in a loop of tonnage's own)</h3>"
        yield _changes("technique", [(text(item.technique), item) for item in script_plan.unexpressed])
    yield from (f'<p class="quiet">{text(note)}</p>' for note in list_notes(script_plan))
    last = script_plan.before if script_plan.after is None else script_plan.after.estimate
    yield f"<h3>{'The run as it is' if script_plan.after is None else 'The run with the changes'}</h3>"
    yield from html.list_parts(last)


def _code(words: str) -> str:
    return f"<code>{text(words)}</code>"


def _beside(script_plan: ScriptPlan) -> str:
    """Return a table with one column for each of the two runs."""
    runs = [script_plan.before] + ([script_plan.after.estimate] if script_plan.after is not None else [])
    rows = [
        ("fits", *("yes" if run.fits else "no" for run in runs)),
        ("host memory", *(format_host(run.host) for run in runs)),
        ("peak of the process", *(text(format_reached(run, run.peak.process_bytes)) for run in runs)),
        ("allocated", *(text(format_reached(run, run.peak.allocated_bytes)) for run in runs)),
        (
            "free",
            *(
                format_gib(max(run.cluster["capacity_bytes"] - run.peak.process_bytes, 0)) if run.fits_card else "-"
                for run in runs
            ),
        ),
    ]
    if any(script_plan.step_seconds):
        rows.append(("a step (time model)", *(seconds(value) for value in script_plan.step_seconds[: len(runs)])))
    return table(("", *("as it is", "with the changes")[: len(runs)]), rows, numbers=(1, 2))


def _changes(first: str, rows: Sequence[tuple[str, Change]]) -> str:
    shown = [(words, saving(item.saves_bytes), cost(item.costs_seconds), text(item.why)) for words, item in rows]
    return table((first, "saves", "costs", "why"), shown, numbers=(1, 2))


def _line(script_plan: ScriptPlan) -> Iterator[str]:
    if script_plan.after is None:
        return
    yield f"<h3>As it was run</h3><pre>{text(script_plan.after.line)}</pre>"
    if script_plan.after.in_code:
        code = "\n".join(map(text, script_plan.after.in_code))
        yield f"<p>and, in its own code (put there in this run):</p><pre>{code}</pre>"
    yield from (f"<p>{text(words)}</p>" for words in script_plan.after.not_taken)
