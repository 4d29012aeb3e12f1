"""The sentences and rows of a report, worded once; the views only place and colour them."""

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from tonnage.estimates.estimate import Estimate, Moment, PhasePeak
from tonnage.report.palette import LOOKS, OTHERS, Look, look
from tonnage.report.shortage import shortage
from tonnage.units import MIB, count, counted, gib, size

_OF_QLORA: Final = ("quant", "unquantized_dtype")
"""Options that mean something under one method only."""
_OF_PIPELINES: Final = ("pp_schedule", "pp_stages")
_DEGREES: Final = ("tp", "pp", "cp", "ep")
_UNREMARKABLE: Final = ("none", "auto", "plain", "freed", "default", "tonnage", None)

_LIBRARY: Final = re.compile(
    r"^.*(?:(?:site|dist)-packages|tonnage/torch-[^/]+|/lib/python3[^/]*)/|^.*/src/(?=tonnage/)"
    r"|^<frozen.*"
)
_LENGTH: Final = re.compile("[0-9]{1,12}")
_PLUMBING: Final = re.compile(r"/torch/nn/modules/module\.py:")


@dataclass(frozen=True, kw_only=True)
class Share:
    """One piece of the stacked bar."""

    look: Look
    """Its name and colour."""
    bytes: int
    """How much of the card it takes."""


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """Ranks with equal numbers, as one row."""

    ranks: str
    """`0`, `1-7` or `0, 2, 5-7`."""
    fits: bool
    """Whether their steps ran to the end."""
    allocated_bytes: int
    """Peak of the caching allocator's blocks."""
    reserved_bytes: int
    """Peak of what it held."""
    process_bytes: int
    """Peak of the process."""


def headline(estimate: Estimate) -> str:
    """The answer in two or three words."""
    if not estimate.fits:
        return "DOES NOT FIT"
    return "FITS, BARELY" if is_tight(estimate) else "FITS"


def is_tight(estimate: Estimate) -> bool:
    """True when it fits, but the upper end of the interval does not."""
    capacity = capacity_bytes(estimate)
    return estimate.fits and capacity is not None and estimate.peak.high_bytes + others_bytes(estimate) > capacity


def capacity_bytes(estimate: Estimate) -> int | None:
    """What one card holds, as its driver reports it; None where unknown."""
    return whole(estimate.cluster, "capacity_bytes") or None


def whole(values: dict[str, Any], name: str) -> int | None:
    """A number from the fields that may hold anything; None when it is absent, negative or of another type."""
    value = values.get(name)
    return value if type(value) is int and value >= 0 else None


def subject(estimate: Estimate) -> str:
    """What was asked about: the model and its size, or the command of a dry-run."""
    command = estimate.job.get("command")
    if command:
        return shlex.join(map(str, command)) if isinstance(command, list | tuple) else str(command)
    name = str(estimate.model.get("name") or "model")
    return f"{name} ({', '.join(_parameters(estimate.model))})" if _parameters(estimate.model) else name


def _parameters(model: dict[str, Any]) -> list[str]:
    total, trainable = whole(model, "parameters"), whole(model, "trainable_parameters")
    if total is None:
        return []
    return [f"{count(total)} parameters"] + (
        [f"{count(trainable)} trainable"] if trainable not in (None, total) else []
    )


def choices(estimate: Estimate) -> str:
    """The job and plan in one line: what was chosen, leaving out what is nobody's choice."""
    job, plan = estimate.job, estimate.plan
    parts = [str(job["method"])] if job.get("method") else []
    length, batch, micro_batches = (whole(job, name) for name in ("seq_len", "micro_batch", "grad_accum"))
    if batch is not None and estimate.model.get("words") is False:  # of images the network makes its own tokens
        parts.append(samples(batch))
    elif length is not None and batch is not None:
        parts.append(f"{batch} x {longest_text(job, length)}")
    if micro_batches is not None and micro_batches > 1:
        parts.append(f"{micro_batches} micro-batches a step")
    for name, value in plan.items():
        if name in _OF_QLORA and job.get("method") != "qlora":
            continue
        if (name in _OF_PIPELINES and plan.get("pp", 1) == 1) or (name in _DEGREES and value == 1):
            continue
        if name == "pp_stages" and plan.get("pp_schedule") != "interleaved":
            continue
        if value is True:
            parts.append(_words(name))
        elif value is not False and value not in _UNREMARKABLE and isinstance(value, str | int):
            parts.append(str(value) if name in ("precision", "optimizer", "shard") else f"{_words(name)} {value}")
    if "command" in job:
        parts += _parameters(estimate.model)
    return ", ".join(parts)


def longest_text(job: Mapping[str, Any], length: int) -> str:
    """How long a sequence is; where lengths are drawn the longest, which is what is asked of the card at most."""
    said = job.get("lengths")
    texts = said if isinstance(said, list | tuple) else ()  # of a file it may be anything
    drawn = [int(text) for text in texts if isinstance(text, str) and _LENGTH.fullmatch(text)]
    return f"up to {min(max(drawn), length):,} tokens" if drawn else f"{length:,} tokens"


def samples(number: int) -> str:
    """What a batch of no text has: `1 sample`, `64 samples`."""
    return counted(number, "sample")


def _words(name: str) -> str:
    return name.replace("_", " ")


def first_and_later(estimate: Estimate) -> list[PhasePeak]:
    """The peaks of the first optimizer step, which begins without states, and of all later ones; empty for one."""
    if len(estimate.steps) < 2:
        return []
    first, *later = ((step.allocated_bytes, step.reserved_bytes) for step in estimate.steps)
    highest = [max(column) for column in zip(*later, strict=True)]
    return [
        PhasePeak(name="first step", allocated_bytes=first[0], reserved_bytes=first[1]),
        PhasePeak(name="later steps", allocated_bytes=highest[0], reserved_bytes=highest[1]),
    ]


def card(estimate: Estimate) -> str:
    """The card and how many of them: `H100-80GB`, `8 x A100-80GB`, `4 x 8 x H100-80GB`."""
    cluster = estimate.cluster
    name = str(cluster.get("gpu") or "GPU")
    gpus, nodes = whole(cluster, "gpus") or 1, whole(cluster, "nodes") or 1
    if nodes > 1 and gpus % nodes == 0:
        return f"{nodes} x {gpus // nodes} x {name}"
    return f"{gpus} x {name}" if gpus > 1 else name


def need(estimate: Estimate) -> str:
    """What the process takes, of how much, and what that leaves or where it ended."""
    peak, capacity = estimate.peak, capacity_bytes(estimate)
    if not estimate.fits:
        return _shortage(estimate)
    if capacity is None:
        return f"{gib(peak.process_bytes)} at the peak."
    others = others_bytes(estimate)
    beside = f" beside {gib(others)} of other processes" if others else ""
    free = max(capacity - peak.process_bytes - others, 0)
    taken = f"{gib(peak.process_bytes)} of {gib(capacity)} ({percent(peak.process_bytes, capacity)})"
    return f"{taken}{beside}; {gib(free)} free."


_OUTSIDE: Final = {"CUDA error": "room for a CUDA context", "Cuda failure": "room for NCCL's buffers"}
"""What is asked of a card beside torch's allocator, by words of the error where it is full."""


def _shortage(estimate: Estimate) -> str:
    oom, capacity = estimate.oom, capacity_bytes(estimate)
    limit = f" of {gib(capacity)}" if capacity else ""
    process = estimate.peak.process_bytes
    fit = capacity is None or process <= capacity
    used = f"{'the most in use was' if fit else 'the process would take'} {gib(process)}{limit}"
    if oom is None:
        return f"The card was full; {used}."
    asked = shortage(oom.message).asked_bytes
    what = next((what for words, what in _OUTSIDE.items() if words in oom.message), "more")
    request = f"{size(asked)} more asked for" if asked is not None else f"{what} asked for"
    return f"Out of memory in {moment(oom.step, oom.phase, oom.layer)}: {request}; {used}."


def interval(estimate: Estimate) -> str:
    """The interval of the process peak."""
    peak = estimate.peak
    if peak.low_bytes == peak.high_bytes:
        return f"{size(peak.process_bytes)}, without uncertainty"
    over = "; its upper end is more than the card has" if is_tight(estimate) else ""
    return f"{size(peak.low_bytes)} to {size(peak.high_bytes)}{over}"


def moment(step: int, phase: str, layer: str) -> str:
    """`step 2, backward, in model.layers.31`."""
    parts = [f"step {step}"] if step > 0 else []
    return ", ".join([*parts, phase or "an unknown phase", *([f"in {layer}"] if layer else [])])


def amount(value_bytes: int) -> str:
    """GiB, so that a column can be compared at a glance; small amounts in their own unit, so that none reads as 0."""
    return gib(value_bytes) if value_bytes >= 100 * MIB or value_bytes == 0 else size(value_bytes)


def percent(part_bytes: int, whole_bytes: int) -> str:
    """`18.9 %`."""
    return f"{100 * part_bytes / whole_bytes:.1f} %" if whole_bytes else "-"


def shares(estimate: Estimate) -> list[Share]:
    """The pieces of the bar in stacking order, without the empty ones."""
    held = estimate.peak.by_category
    order = [*LOOKS, *(name for name in held if name not in LOOKS)]
    own = [Share(look=look(name), bytes=held[name]) for name in order if held.get(name, 0) > 0]
    others = others_bytes(estimate)
    return [*own, Share(look=OTHERS, bytes=others)] if others else own


def others_bytes(estimate: Estimate) -> int:
    """What other processes of a dry-run held of this one's card when they all together held most of it."""
    found = [
        (abs((whole(process, "peak_bytes") or 0) - estimate.peak.process_bytes), place, number)
        for place, card in enumerate(estimate.cards)
        for number, process in enumerate(card.get("processes", ()))
        if process.get("rank") == estimate.rank
    ]
    if not found:
        return 0
    _, place, own = min(found)  # processes of one rank, such as a trainer and its server, differ in their peaks
    processes = estimate.cards[place]["processes"]
    return sum(whole(process, "held_bytes") or 0 for number, process in enumerate(processes) if number != own)


def free_bytes(estimate: Estimate) -> int:
    """What the bar leaves empty."""
    return max((capacity_bytes(estimate) or 0) - sum(share.bytes for share in shares(estimate)), 0)


def host(estimate: Estimate) -> str:
    """Memory on the host's side."""
    resident = estimate.host.peak_bytes
    known = f"{size(resident)} resident at most" if resident is not None else "resident size unknown"
    pinned = estimate.host.pinned_bytes
    if pinned >= MIB:  # below, torch's own scalars
        known += f", {size(pinned)} of it pinned"
    return f"{known}, {size(estimate.host.managed_bytes)} managed" if estimate.host.managed_bytes else known


def how(estimate: Estimate) -> str:
    """Where the numbers come from: source and versions."""
    source = {"ghost": "run on a ghost GPU", "meta": "traced without a GPU", "real": "recorded on a real GPU"}
    versions = ", ".join(f"{name} {version}" for name, version in estimate.versions.items() if version)
    return f"{source.get(estimate.source, estimate.source)}{f' ({versions})' if versions else ''}"


def facts(estimate: Estimate) -> list[tuple[str, tuple[str, ...]]]:
    """What a doubting reader asks next, by name: the interval, the host, where the numbers come from."""
    held = f"{size(estimate.peak.reserved_bytes)} reserved, the rest runtime"
    rows = [
        ("process", (f"{interval(estimate)} ({held})",)),
        ("step", (pace(estimate),) if estimate.time.get("step_seconds") else ()),
        ("host", (host(estimate),)),
        ("how", (how(estimate),)),
        ("run", estimate.coverage.run),
        ("modelled", estimate.coverage.modelled),
        ("assumed", estimate.coverage.assumed),
    ]
    return [(name, lines) for name, lines in rows if lines]


def pace(estimate: Estimate) -> str:
    """How long a step takes: `about 0.488 s (0.44 to 0.55), 8,390 tokens/s a GPU, MFU 41 %, bound by compute`."""
    time = estimate.time
    low, high = time.get("low_seconds"), time.get("high_seconds")
    around = f" ({_seconds(low)} to {_seconds(high)})" if low and high else ""
    rate = time["tokens_per_second_per_gpu"]
    tokens = "" if rate is None else f"{rate:,.0f} tokens/s a GPU, "  # of a script nobody knows its tokens
    return (
        f"about {_seconds(time['step_seconds'])} s{around}, {tokens}MFU {100 * time['mfu']:.0f} %, "
        f"bound by {time['bound_by']}"
    )


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def rank_rows(estimate: Estimate) -> list[RankRow]:
    """A row for every group of ranks with equal numbers, the fullest first; empty when one rank was run."""
    if len(estimate.ranks) < 2:
        return []
    groups: dict[tuple[bool, int, int, int], list[int]] = {}
    for entry in estimate.ranks:
        numbers = (entry["allocated_bytes"], entry["reserved_bytes"], entry["process_bytes"])
        groups.setdefault((entry["fits"], *numbers), []).append(entry["rank"])
    rows = [
        RankRow(
            ranks=spans(ranks), fits=fits, allocated_bytes=allocated, reserved_bytes=reserved, process_bytes=process
        )
        for (fits, allocated, reserved, process), ranks in groups.items()
    ]
    return sorted(rows, key=lambda row: (row.fits, -row.process_bytes))


def spans(numbers: Iterable[int]) -> str:
    """`0, 2-4, 7` from 0, 2, 3, 4, 7."""
    runs = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    ends = [[value for _, value in run] for _, run in runs]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ends)


def step_starts(curve: tuple[Moment, ...]) -> dict[int, int]:
    """Where in the curve each optimizer step (from 1) first runs forward."""
    starts: dict[int, int] = {}
    for index, point in enumerate(curve):
        if point.phase == "forward":
            starts.setdefault(point.step + 1, index)
    return starts


def frames(stack: tuple[str, ...]) -> list[str]:
    """The frames worth a line: the user's own, and the four innermost of libraries; gaps say how many were left out.

    How torch gets from one module to the next (`_call_impl` and the like) is never worth one.
    """
    own = [index for index, frame in enumerate(stack) if not _LIBRARY.search(frame)]
    libraries = [index for index, frame in enumerate(stack) if _LIBRARY.search(frame) and not _PLUMBING.search(frame)]
    lines: list[str] = []
    last = -1
    for index in sorted(own[-8:] + libraries[-4:]):
        if index - last > 1:
            lines.append(_gap(index - last - 1))
        lines.append(_LIBRARY.sub("", stack[index]))
        last = index
    return lines


def _gap(left_out: int) -> str:
    return f"... {counted(left_out, 'frame')} left out"
