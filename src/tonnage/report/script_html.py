"""An Advice as a self-contained HTML page: the script before and after the changes, the changes, the last run."""

from collections.abc import Iterator, Sequence

from tonnage.report import html, markup
from tonnage.report.markup import table, text
from tonnage.report.plans import cost, saving, seconds
from tonnage.report.script import VERDICTS, describe_verdict, format_host, format_reached, list_notes
from tonnage.script.advice import Advice
from tonnage.script.changes import Change
from tonnage.units import format_gib


def page(advice: Advice) -> str:
    """Return the page, which also contains the Advice as JSON data."""
    word, _ = VERDICTS[advice.status]
    title = f"{word}: {' '.join(advice.command)}"
    return markup.document(title, markup.fragment(_parts(advice)), advice.to_json())


def _parts(advice: Advice) -> Iterator[str]:
    word, _ = VERDICTS[advice.status]
    kind = {"found": "fits", "unknown": "tight"}.get(advice.status, "full")
    yield f'<p class="answer"><span class="{kind}">{word}</span> {text(describe_verdict(advice))}</p>'
    yield f"<p>{text(' '.join(advice.command))}</p>\n<p>{text(advice.seen)}</p>"
    if advice.now is not None:
        yield f'<p class="quiet">{text(advice.now.words)}</p>'
    if advice.by_trial:
        yield f"<p>by trying, without a plan: {text(str(advice.why_not))}</p>"
    yield "<h3>The script, run</h3>"
    yield _beside(advice)
    if advice.changes:
        yield (
            "<h3>What to change</h3>" if advice.status != "too_large" else "<h3>What would change, had it fitted</h3>"
        )
        yield _changes(
            "setting", [("<br>".join(map(_code, map(str, item.settings))), item) for item in advice.changes]
        )
    yield from _line(advice)
    if advice.failed:
        yield "<h3>Tried, and not advised</h3>"
        yield table((), [(text(refused.what), text(refused.why)) for refused in advice.failed])
    if advice.unexpressed:
        yield "<h3>Techniques that it has no setting for (the same plan in a loop of tonnage's own)</h3>"
        yield _changes("technique", [(text(item.technique), item) for item in advice.unexpressed])
    yield from (f'<p class="quiet">{text(note)}</p>' for note in list_notes(advice))
    last = advice.before if advice.after is None else advice.after.estimate
    yield f"<h3>{'The run as it is' if advice.after is None else 'The run with the changes'}</h3>"
    yield from html.list_parts(last)


def _code(words: str) -> str:
    return f"<code>{text(words)}</code>"


def _beside(advice: Advice) -> str:
    """Return a table with one column for each of the two runs."""
    runs = [advice.before] + ([advice.after.estimate] if advice.after is not None else [])
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
    if any(advice.step_seconds):
        rows.append(("a step (time model)", *(seconds(value) for value in advice.step_seconds[: len(runs)])))
    return table(("", *("as it is", "with the changes")[: len(runs)]), rows, numbers=(1, 2))


def _changes(first: str, rows: Sequence[tuple[str, Change]]) -> str:
    shown = [(words, saving(item.saves_bytes), cost(item.costs_seconds), text(item.why)) for words, item in rows]
    return table((first, "saves", "costs", "why"), shown, numbers=(1, 2))


def _line(advice: Advice) -> Iterator[str]:
    if advice.after is None:
        return
    yield f"<h3>As it was run</h3><pre>{text(advice.after.line)}</pre>"
    if advice.after.in_code:
        code = "\n".join(map(text, advice.after.in_code))
        yield f"<p>and, in its own code (put there in this run):</p><pre>{code}</pre>"
    yield from (f"<p>{text(words)}</p>" for words in advice.after.not_taken)
