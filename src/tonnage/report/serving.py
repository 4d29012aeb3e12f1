"""The answer about an inference engine as text: verdict, bar of the card, growth of the KV cache, advice."""

from collections.abc import Iterator, Sequence
from typing import Final

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tonnage.report import terminal
from tonnage.report.canvas import BAD, GOOD, TIGHT, Canvas, draw, text, title
from tonnage.report.palette import LOOKS, Look
from tonnage.serving.advice import ServingAdvice, needed_bytes
from tonnage.serving.asking import ServingAnswer
from tonnage.serving.closed_form import ServingEstimate
from tonnage.serving.kv_cache import Request
from tonnage.serving.load import Load
from tonnage.serving.quantization import describe_format
from tonnage.units import format_gib, format_size

_LOOKS: Final[dict[str, Look]] = {
    "weights": LOOKS["parameter"],
    "step's peak": LOOKS["activation"],
    "KV cache": Look(label="KV cache", meaning="", colour="#009E73", glyph="▒", letter="K"),
    "CUDA graphs": Look(label="CUDA graphs", meaning="", colour="#CC79A7", glyph="▚", letter="G"),
    "outside torch": LOOKS["runtime"],
}
_MEANINGS: Final = {
    "weights": "as loaded on one GPU",
    "step's peak": "the step, its sampler, or compiling",
    "KV cache": "the pool for all requests",
    "CUDA graphs": "captured batch sizes",
    "outside torch": "CUDA context, loaded kernels, NCCL",
}
_LENGTHS: Final = (256, 1024, 4096, 16_384, 65_536, 262_144)
"""Tokens of a request in the picture of the cache's growth."""

_FEW: Final = 0.001
"""Part of the prompts that may be refused without a word."""

_COUNTS: Final = (1, 8, 64)
"""Requests together in that picture."""


def render(answer: ServingAnswer, *, width: int = 100, colour: bool = False, unicode: bool = True) -> str:
    """Return the report with this width and a final newline."""
    canvas, advice = Canvas.of(width=width, colour=colour, unicode=unicode), answer.advice
    if answer.ran is not None:
        max_len = answer.estimate.settings.max_len
        load = "" if answer.load is None else draw(_load(answer.load, max_len, canvas), canvas)
        return terminal.render(answer.ran, width=width, colour=colour, unicode=unicode) + load
    return draw(_parts(answer, canvas), canvas) + (f"  {advice[0].command}\n" if advice and advice[0].fits else "")


def _parts(answer: ServingAnswer, canvas: Canvas) -> Iterator[Text | Table | Padding]:
    estimate, advice, load = answer.estimate, answer.advice, answer.load
    yield _verdict(estimate)
    yield from _bar(estimate, canvas)
    if estimate.worst.pool_bytes > 0 and estimate.worst.layout.groups:
        yield from _growth(estimate, canvas)
    if load is not None:
        yield from _load(load, estimate.settings.max_len, canvas)
    yield from _assumed([*estimate.assumed, *([answer.lacks] if answer.lacks else [])], canvas)
    if advice:
        yield from _advice(advice, canvas)
    elif not estimate.starts:
        yield title("No change that was tried makes it start.")


def _verdict(estimate: ServingEstimate) -> Table:
    full, serving = estimate.settings, estimate.serving
    rows = Table.grid(padding=(0, 2))
    rows.add_column(no_wrap=True)
    rows.add_column()
    if estimate.starts:
        is_sure = estimate.worst.low_pool_bytes >= estimate.request_bytes
        word, style = ("STARTS", GOOD) if is_sure else ("JUST STARTS", TIGHT)
        rows.add_row(Text(word, style=style), text(_holds(estimate), "bold"))
    else:
        needs = format_gib(needed_bytes(estimate))
        error = serving.error or ""
        rows.add_row(
            Text("DOES NOT START", style=BAD),
            text(f"{error[:1].upper()}{error[1:]}. It needs {needs} on each GPU.", "bold"),
        )
    rows.add_row("", text(f"{estimate.network.name} on {estimate.cluster}, {serving.engine}"))
    degrees = [f"{name} {getattr(full.stated, name)}" for name in ("tp", "pp", "dp", "ep")]
    kinds = ["fp32 weights" if full.element_bytes > 2 else f"{describe_format(full.quantization)} weights"]
    kv_dtype = "fp8" if full.has_fp8_cache and full.stated.kv_dtype == "auto" else full.stated.kv_dtype
    kinds += [f"KV cache {kv_dtype}"] if kv_dtype != "auto" else []
    more = [word for word in degrees if not word.endswith(" 1")]
    rows.add_row(
        "",
        text(
            ", ".join([*more, *kinds])
            + f"; requests of at most {full.max_len:,} tokens, {full.max_seqs:,} together, "
            f"{full.max_batched_tokens:,} tokens a step; {full.utilization:g} of the card"
        ),
    )
    return rows


def _holds(estimate: ServingEstimate) -> str:
    serving = estimate.serving
    if not estimate.worst.layout.groups:
        return "The network keeps nothing of a request: it has no KV cache."
    concurrency = f"{serving.concurrency:.2f}" if serving.concurrency else "any number of"
    return (
        f"KV cache of {format_gib(serving.kv_cache_bytes or 0)}: {serving.kv_cache_tokens:,} tokens "
        f"({serving.low_tokens:,} to {serving.high_tokens:,}), {concurrency} requests of {serving.max_len:,} tokens."
    )


def _bar(estimate: ServingEstimate, canvas: Canvas) -> Iterator[Text | Padding]:
    worst, device = estimate.worst, estimate.settings.device
    sizes = {
        "weights": worst.weights_bytes,
        "step's peak": worst.profile.bytes,
        "KV cache": max(0, worst.pool_bytes),
        "CUDA graphs": worst.graphs.bytes,
        "outside torch": worst.outside.bytes + estimate.settings.first_bytes,
    }
    total = max(device.capacity_bytes, sum(sizes.values()))
    stage = f", stage {worst.stage} of {estimate.settings.stated.pp}" if estimate.settings.stated.pp > 1 else ""
    yield title("On each GPU", text(f"of {format_gib(device.capacity_bytes)}{stage}", "dim"), canvas)
    line, inner = Text(canvas.ends[0]), canvas.width - 2
    drawn = sum_bytes = 0
    for name, size in sizes.items():
        sum_bytes += size
        end = round(inner * sum_bytes / total)
        look = _LOOKS[name]
        line.append((look.glyph if canvas.unicode else look.letter) * (end - drawn), style=look.colour)
        drawn = end
    line.append(("·" if canvas.unicode else ".") * (inner - drawn), style="dim")
    line.append(canvas.ends[1])
    yield line
    rows = Table.grid(padding=(0, 2))
    for name, size in sizes.items():
        look = _LOOKS[name]
        rows.add_row(
            Text(look.glyph if canvas.unicode else look.letter, style=look.colour),
            name,
            Text(format_gib(size), justify="right"),
            Text(f"{100 * size / device.capacity_bytes:.1f} %", justify="right"),
            Text(_MEANINGS[name], style="dim"),
        )
    yield Padding(rows, (0, 0, 0, 1))


def _growth(estimate: ServingEstimate, canvas: Canvas) -> Iterator[Text | Padding]:
    """Yield how the cache of one request grows with its tokens, and how many fill the pool."""
    layout, pool = estimate.worst.layout, estimate.pool
    batched = estimate.request.batched_tokens
    full = estimate.settings
    lengths = [length for length in _LENGTHS if length < full.max_len] + [full.max_len]
    yield title("Growth of the KV cache", text("part of the pool that requests of this length fill", "dim"), canvas)
    rows = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("tokens", "one request", "fit"):
        rows.add_column(heading, justify="right")
    for count in _COUNTS:
        rows.add_column(f"{count} together")
    room = max(6, min(20, (canvas.width - 36) // len(_COUNTS) - 2))
    for length in lengths:
        request = Request(length=length, batched_tokens=batched)
        blocks = layout.request_blocks(request)
        bars = (_filled(count * blocks / pool.blocks, room, canvas) for count in _COUNTS)
        rows.add_row(
            f"{length:,}", format_size(layout.request_bytes(request)), f"{int(pool.concurrency(request)):,}", *bars
        )
    yield Padding(rows, (0, 0, 0, 1))


def _filled(part: float, room: int, canvas: Canvas) -> Text:
    """Return a bar of the part of the pool that is filled; one that is more than full is marked."""
    glyph, free = ("▒", "·") if canvas.unicode else ("K", ".")
    if part > 1:
        return Text(glyph * (room - 1) + "!", style=BAD)
    length = min(room, max(1, round(part * room)))
    return Text(glyph * length, style=_LOOKS["KV cache"].colour) + Text(free * (room - length), style="dim")


def _load(load: Load, max_len: int, canvas: Canvas) -> Iterator[Text | Padding]:
    """Yield how requests of some lengths are served: in pages, in slots, and how fast."""
    lengths = load.lengths
    arrival = "which all wait" if lengths.rate is None else f"{lengths.rate:g} a second"
    yield title(
        "Under load", text(f"prompts of {lengths.p50:,} tokens, 95th percentile {lengths.p95:,}", "dim"), canvas
    )
    lines = list(say_refused(load.refused, max_len))
    paged, slots, speed = load.paged, load.slots, load.speed
    if paged is not None and slots is not None:
        lines += [
            f"in pages: {paged.mean_running:.0f} requests together (at most {paged.peak_running}), "
            f"{paged.preemptions:,} of {paged.requests:,} put back, "
            f"{100 * paged.mean_waste:.1f} % of the pages empty; {arrival}",
            f"in slots of the maximal length: {slots.slots} requests together, {100 * slots.mean_waste:.0f} % empty",
        ]
    if speed is not None:
        lines.append(
            f"{speed.output_tokens_per_second:,.0f} tokens/s with {speed.running:.0f} requests, a token every "
            f"{1000 * speed.token_seconds:.1f} ms, the first after {speed.first_token_seconds:.3g} s "
            f"({speed.first_token_low_seconds:.2g} to {speed.first_token_high_seconds:.2g})"
        )
    for line in lines:
        yield Padding(text(line), (0, 0, 0, 1))


def say_refused(part: float, max_len: int) -> Iterator[str]:
    """Yield a sentence about the prompts that an engine refuses, where there are more than a few."""
    if part >= _FEW:
        yield f"the engine refuses {100 * part:.3g} % of the prompts, of {max_len:,} tokens (--max-len) or more"


def _assumed(sentences: Sequence[str], canvas: Canvas) -> Iterator[Text | Padding]:
    if not sentences:
        return
    yield title("Assumed", None, canvas)
    for sentence in sentences:
        yield Padding(text(sentence), (0, 0, 0, 1))


def _advice(advice: Sequence[ServingAdvice], canvas: Canvas) -> Iterator[Text | Table | Padding]:
    starts = any(item.fits for item in advice)
    heading = "What would make it start" if starts else "No change that was tried makes it start"
    yield title(heading, text("each was computed", "dim"), canvas)
    rows = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("change", "starts", "needs", "KV tokens", "requests", "numbers"):
        rows.add_column(heading, justify="left" if heading in ("change", "starts", "numbers") else "right")
    for item in advice:
        words = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in item.change.items())
        rows.add_row(
            words,
            "yes" if item.fits else "no",
            format_gib(item.peak_bytes),
            f"{item.kv_cache_tokens:,}",
            "-" if item.concurrency is None else f"{item.concurrency:.2f}",
            "others" if item.changes_mathematics else "the same",
        )
    yield Padding(rows, (0, 0, 0, 1))
