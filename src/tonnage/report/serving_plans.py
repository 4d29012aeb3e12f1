"""Ways to serve a model as text: the best one with its reasons and its command, then the others."""

from collections.abc import Iterator

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tonnage.report.canvas import BAD, GOOD, LEAST_OF_PLANS, Canvas, draw, text, title
from tonnage.report.serving import say_refused
from tonnage.serving.exports import notes_of, own_command
from tonnage.serving.planning import ServePlan, ServeSolution
from tonnage.serving.speed import INTERVAL
from tonnage.units import format_gib


def render(solution: ServeSolution, *, width: int = 100, colour: bool = False, unicode: bool = True) -> str:
    """Return the report with this width and a final newline; commands are not broken."""
    canvas = Canvas.of(width=width, colour=colour, unicode=unicode, least=LEAST_OF_PLANS)
    shown = draw(_parts(solution, canvas), canvas)
    plan = solution.plans[0] if solution.plans else None
    command = None if plan is None else own_command(plan.estimate)
    return shown if command is None else f"{shown}\n  {command}\n"


def _parts(solution: ServeSolution, canvas: Canvas) -> Iterator[Text | Table | Padding]:
    question = solution.question
    load = (
        f"{question.concurrency:,} requests at once, prompts of {question.lengths.p50:,} tokens (95th percentile "
        f"{question.lengths.p95:,}), answers of {question.lengths.mean_output:,.0f}, at most {question.max_len:,} "
        "together"
    )
    rows = Table.grid(padding=(0, 2))
    rows.add_column(no_wrap=True)
    rows.add_column()
    if solution.plans:
        best = solution.plans[0]
        rows.add_row(Text("SERVES", style=GOOD), text(f"{_found(solution)}{best.name}", "bold"))
        rows.add_row("", text(f"{question.network.name} on {question.cluster}: {load}"))
        for line in (*say_refused(question.refused, question.max_len), *_speed_lines(best, question.price)):
            rows.add_row("", text(line))
        yield rows
        yield from _reasons(best, canvas)
        if len(solution.plans) > 1:
            yield from _others(solution, canvas)
        yield from _assumed(best, canvas)
        if own_command(best.estimate) is not None:
            yield title(f"{best.estimate.settings.engine.name}'s command")
        return
    rows.add_row(Text("DOES NOT SERVE", style=BAD), text(_nearest_words(solution), "bold"))
    rows.add_row("", text(f"{question.network.name} on {question.cluster}: {load}"))
    yield rows
    if solution.remedies:
        yield title("What would serve", text("each was computed", "dim"), canvas)
        for remedy in solution.remedies:
            change = ", ".join(f"--{name} {value}" for name, value in remedy.change.items())
            cost = "" if remedy.price is None else f", {remedy.price:g} an hour"
            line = f"{change}: {remedy.plan.name}; {remedy.plan.held:,} requests{cost}"
            yield Padding(text(line), (0, 0, 0, 1))


def _found(solution: ServeSolution) -> str:
    return f"{solution.found}: " if solution.found else ""


def _nearest_words(solution: ServeSolution) -> str:
    nearest = solution.nearest
    if nearest is None:
        return "No combination can be computed."
    if not nearest.estimate.starts:
        error = nearest.estimate.serving.error or ""
        return f"Nothing starts; closest is {nearest.name}: {error}."
    return (
        f"At most {nearest.held:,} of {solution.question.concurrency:,} requests run together ({nearest.name}); "
        "it needs more or larger GPUs, or fewer requests."
    )


def _speed_lines(plan: ServePlan, price: float | None) -> Iterator[str]:
    serving = plan.estimate.serving
    yield (
        f"KV cache of {format_gib(serving.kv_cache_bytes or 0)} on each GPU, {serving.kv_cache_tokens:,} tokens a "
        f"replica; {plan.held:,} such requests fit"
    )
    speed = plan.speed
    if speed is None:
        yield "How fast it serves is not known."
        return
    low, high = (speed.output_tokens_per_second / factor for factor in reversed(INTERVAL))
    yield (
        f"{speed.output_tokens_per_second:,.0f} tokens/s ({low:,.0f} to {high:,.0f}), "
        f"{speed.requests_per_second:.2f} requests/s; a request gets one every {1000 * speed.token_seconds:.1f} ms, "
        f"bound by {speed.bound_by}"
    )
    yield (
        f"first token after {speed.first_token_seconds:.3g} s ({speed.first_token_low_seconds:.2g} to "
        f"{speed.first_token_high_seconds:.2g}); alone, prompts {speed.prefill_tokens_per_second:,.0f} tokens/s, "
        f"answers {speed.decode_tokens_per_second:,.0f} tokens/s"
    )
    cost = plan.cost_per_million(price)
    if cost is not None:
        yield f"{cost:.2f} a million tokens of answers, at {price:g} an hour and GPU"
    simulation = plan.simulation
    if simulation is not None:
        yield (
            f"simulated with {simulation.requests:,} requests: {simulation.mean_running:.0f} together in a replica, "
            f"{simulation.preemptions:,} put back, {100 * simulation.mean_used:.0f} % of the pool in use, "
            f"{100 * simulation.mean_waste:.1f} % of it empty"
        )


def _reasons(plan: ServePlan, canvas: Canvas) -> Iterator[Text | Padding]:
    if not plan.reasons:
        return
    yield title("Why")
    rows = Table.grid(padding=(0, 2))
    for reason in plan.reasons:
        rows.add_row(text(reason.technique, "bold"), text(reason.why))
    yield Padding(rows, (0, 0, 0, 1))


def _others(solution: ServeSolution, canvas: Canvas) -> Iterator[Text | Padding]:
    yield title("Others")
    rows = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("plan", "tokens/s", "first token", "fit", "numbers"):
        rows.add_column(heading, justify="left" if heading in ("plan", "numbers") else "right")
    for plan in solution.plans[1:]:
        speed = plan.speed
        rows.add_row(
            plan.name,
            "-" if speed is None else f"{speed.output_tokens_per_second:,.0f}",
            "-" if speed is None else f"{speed.first_token_seconds:.3g} s",
            f"{plan.held:,}",
            "the same" if plan.keeps_numbers else "others",
        )
    yield Padding(rows, (0, 0, 0, 1))


def _assumed(plan: ServePlan, canvas: Canvas) -> Iterator[Text | Padding]:
    yield title("Assumed")
    sentences = [
        f"speed: steps take {INTERVAL[0]} to {INTERVAL[1]} times what is predicted, by three published figures",
        *plan.estimate.assumed,
        *notes_of(plan.estimate),
    ]
    for sentence in sentences:
        yield Padding(text(sentence), (0, 0, 0, 1))
