"""The sentences and table rows of a report, written once for all views, which only arrange and colour them."""

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from tonnage.estimates.estimate import Advice, Estimate, Moment, PhasePeak, capacity_bytes, shown_peak, whole
from tonnage.estimates.shortage import shortage
from tonnage.estimates.training import describe_training
from tonnage.options import spell_option
from tonnage.planner.search_space import OFFLOADS
from tonnage.report.engine_words import describe_serving
from tonnage.report.palette import LOOKS, OTHERS, Look, look
from tonnage.units import MIB, count, format_gib, format_size, pluralise

ADVICE_TITLE: Final = "What to try (upper limits, not promises: estimate again)"
AXIS: Final = "x axis: modules in order, not seconds"

_QLORA_OPTIONS: Final = ("quant", "unquantized_dtype")
"""Options that have an effect under one method only."""
_PIPELINE_OPTIONS: Final = ("pp_schedule", "pp_stages")
_DEGREES: Final = ("tp", "pp", "cp", "ep")
_DEFAULT_VALUES: Final = ("none", "auto", "plain", "freed", "default", "tonnage", None)
"""Values that a summary of the plan omits."""

_LIBRARY: Final = re.compile(
    r"^.*(?:(?:site|dist)-packages|tonnage/torch-[^/]+|/lib/python3[^/]*)/|^.*/src/(?=tonnage/)"
    r"|^<frozen.*"
)
_LENGTH: Final = re.compile("[0-9]{1,12}")
_MODULE_CALL: Final = re.compile(r"/torch/nn/modules/module\.py:")


@dataclass(frozen=True, kw_only=True)
class Share:
    """One piece of the stacked bar."""

    look: Look
    """Name and colour of its category."""
    bytes: int
    """Bytes of the card that it takes."""


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """Ranks with equal numbers, as one row."""

    ranks: str
    """Numbers of the ranks: `0`, `1-7` or `0, 2, 5-7`."""
    fits: bool
    """True if their steps ran to the end."""
    allocated_bytes: int
    """Peak of the allocated blocks."""
    reserved_bytes: int
    """Peak of the reserved segments."""
    process_bytes: int
    """Peak of the process."""


def headline(estimate: Estimate) -> str:
    """Return the answer in two or three words."""
    if estimate.serving is not None:
        return "STARTS" if estimate.serving.get("starts") else "DOES NOT START"
    if not estimate.fits:
        return "DOES NOT FIT"
    return "FITS, BARELY" if estimate.is_tight else "FITS"


def subject(estimate: Estimate) -> str:
    """Return the subject of the estimate: the model and its size, or the command of a dry-run."""
    command = estimate.job.get("command")
    if command:
        return shlex.join(map(str, command)) if isinstance(command, list | tuple) else str(command)
    name = str(estimate.model.get("name") or "model")
    numbers = _describe_parameters(estimate.model)
    return f"{name} ({', '.join(numbers)})" if numbers else name


def _describe_parameters(model: dict[str, Any]) -> list[str]:
    total, trainable = whole(model, "parameters"), whole(model, "trainable_parameters")
    if total is None:
        return []
    return [f"{count(total)} parameters"] + (
        [f"{count(trainable)} trainable"] if trainable not in (None, total) else []
    )


def choices(estimate: Estimate) -> str:
    """Return the job and the plan in one line, without options that have their default or no effect."""
    job, plan = estimate.job, estimate.plan
    parts = [str(job["method"])] if job.get("method") else []
    length, batch, micro_batches = (whole(job, name) for name in ("seq_len", "micro_batch", "grad_accum"))
    if batch is not None and estimate.model.get("words") is False:  # a network of images makes its own tokens
        parts.append(samples(batch))
    elif length is not None and batch is not None:
        parts.append(f"{batch} x {longest_text(job, length)}")
    if micro_batches is not None and micro_batches > 1:
        parts.append(f"{micro_batches} micro-batches a step")
    for name, value in plan.items():
        if name in _QLORA_OPTIONS and job.get("method") != "qlora":
            continue
        if (name in _PIPELINE_OPTIONS and plan.get("pp", 1) == 1) or (name in _DEGREES and value == 1):
            continue
        if name == "pp_stages" and plan.get("pp_schedule") != "interleaved":
            continue
        label = name.replace("_", " ")
        if value is True:
            parts.append(label)
        elif value is not False and value not in _DEFAULT_VALUES and isinstance(value, str | int):
            parts.append(str(value) if name in ("precision", "optimizer", "shard") else f"{label} {value}")
    if "command" in job:
        known = _describe_parameters(estimate.model)
        parts += known[:1] if estimate.serving is not None else known  # nothing is trained
    return ", ".join(parts)


def longest_text(job: Mapping[str, Any], length: int) -> str:
    """Return the length of a sequence; where lengths are drawn, the longest, which needs the most memory."""
    lengths = job.get("lengths")
    texts = lengths if isinstance(lengths, list | tuple) else ()  # a file may hold anything
    drawn = [int(text) for text in texts if isinstance(text, str) and _LENGTH.fullmatch(text)]
    return f"up to {min(max(drawn), length):,} tokens" if drawn else f"{length:,} tokens"


def samples(number: int) -> str:
    """Return the size of a batch without text: `1 sample`, `64 samples`."""
    return pluralise(number, "sample")


def first_and_later(estimate: Estimate) -> list[PhasePeak]:
    """Return the peaks of the first optimizer step and of all later ones; none for a single step.

    They differ, because the first step begins without optimizer states.
    """
    if len(estimate.steps) < 2:
        return []
    first, *later = ((step.allocated_bytes, step.reserved_bytes) for step in estimate.steps)
    highest = [max(column) for column in zip(*later, strict=True)]
    return [
        PhasePeak(name="first step", allocated_bytes=first[0], reserved_bytes=first[1]),
        PhasePeak(name="later steps", allocated_bytes=highest[0], reserved_bytes=highest[1]),
    ]


def card(estimate: Estimate) -> str:
    """Return the card and the number of cards: `H100-80GB`, `8 x A100-80GB`, `4 x 8 x H100-80GB`."""
    cluster = estimate.cluster
    name = str(cluster.get("gpu") or "GPU")
    gpus, nodes = whole(cluster, "gpus") or 1, whole(cluster, "nodes") or 1
    if nodes > 1 and gpus % nodes == 0:
        return f"{nodes} x {gpus // nodes} x {name}"
    return f"{gpus} x {name}" if gpus > 1 else name


def need(estimate: Estimate) -> str:
    """Return the process's peak and the card's capacity, and the free memory or the moment without memory."""
    peak, capacity = estimate.peak, capacity_bytes(estimate)
    if estimate.serving is not None:
        return describe_serving(estimate.serving)
    if not estimate.fits_card:
        return _describe_shortage(estimate)
    if capacity is None:
        return f"{format_gib(peak.process_bytes)} at the peak."
    if not estimate.host.fits:
        missing = (estimate.host.machine_bytes or 0) - (estimate.host.limit_bytes or 0)
        on_card = f"the GPU has room, {format_gib(peak.process_bytes)} of {format_gib(capacity)}"
        return f"{format_gib(missing)} of host memory missing on each machine; {on_card}."
    others = estimate.others_bytes
    beside = f" beside {format_gib(others)} of other processes" if others else ""
    free = max(capacity - peak.process_bytes - others, 0)
    used = f"{format_gib(peak.process_bytes)} of {format_gib(capacity)} ({percent(peak.process_bytes, capacity)})"
    return f"{used}{beside}; {format_gib(free)} free."


_REQUESTS_OUTSIDE_TORCH: Final = {"CUDA error": "a CUDA context", "Cuda failure": "NCCL's buffers"}
"""Memory that is requested outside torch's allocator, by the words of the error on a full card."""


def _describe_shortage(estimate: Estimate) -> str:
    oom, capacity = estimate.oom, capacity_bytes(estimate)
    whole_step = f"{describe_needed(estimate)} " if estimate.needed else ""
    limit = f" of {format_gib(capacity)}" if capacity else ""
    process = estimate.peak.process_bytes
    fits = capacity is None or process <= capacity
    used = (
        f"at most {format_gib(process)}{limit} in use"
        if fits
        else f"the process would take {format_gib(process)}{limit}"
    )
    if oom is None:
        return f"{whole_step}The card was full; {used}."
    requested = shortage(oom.message).asked_bytes
    outside = next((what for words, what in _REQUESTS_OUTSIDE_TORCH.items() if words in oom.message), None)
    if requested is not None:
        request = f"{format_size(requested)} more requested"
    else:
        request = "more requested" if outside is None else f"no room for {outside}"
    return f"{whole_step}Out of memory in {moment(oom.step, oom.phase, oom.layer)}: {request}; {used}."


def describe_needed(estimate: Estimate) -> str:
    """Return what the whole step needs on a card without a limit, and how much more that is than the card has."""
    needed, capacity = estimate.needed, capacity_bytes(estimate)
    if needed is None:
        return ""
    more = f", {format_gib(max(needed.process_bytes - capacity, 0))} more than the card has" if capacity else ""
    cached = needed.by_category.get("cached", 0)
    kept = f" ({format_gib(needed.process_bytes - cached)} without what the allocator keeps unallocated)"
    return f"Needs {format_gib(needed.process_bytes)}{more}{kept if cached > MIB else ''}."


def advice_headings(estimate: Estimate) -> tuple[str, ...]:
    """Return the headings of the table of changes that were tried."""
    needed = "host memory" if _lacks_host(estimate) else "peak"
    return ("change", "fits", needed, "less by", "s a step", "mathematics")


def _lacks_host(estimate: Estimate) -> bool:
    return estimate.fits_card and not estimate.host.fits


def has_own_advice(estimate: Estimate) -> bool:
    """Return True if a change was tried on the cards that were asked for."""
    return any("gpu" not in advice.change for advice in estimate.advice)


def advice_title(estimate: Estimate) -> str:
    """Return the title of the table of changes that were tried."""
    if estimate.serving is not None:
        return "What would make it start: each of these was run"
    some_fit = any(advice.fits for advice in estimate.advice)
    what = "leaves more room" if estimate.fits else "would fit" if some_fit else "comes nearest"
    return f"What {what}: each of these was run"


def advice_rows(estimate: Estimate) -> list[tuple[str, ...]]:
    """Return a row for each change that was tried, in the order of `advice_headings`."""
    before = estimate.needed_seconds if estimate.needed else estimate.time.get("step_seconds")
    return [
        (
            spell_change(advice.change, is_script=not estimate.plan)
            + ("" if advice.kv_cache_tokens is None else f": {advice.kv_cache_tokens:,} tokens"),
            "barely" if advice.is_tight else "yes" if advice.fits else "no",
            *_needed_and_gained(estimate, advice),
            f"{_format_optional(before)} -> {_format_optional(advice.step_seconds)}",
            "changed" if advice.changes_mathematics else "the same",
        )
        for advice in estimate.advice
    ]


def _needed_and_gained(estimate: Estimate, advice: Advice) -> tuple[str, str]:
    """Return what a changed case needs of the memory that was short, and by how much less."""
    needed, gained = advice.peak_bytes, advice.gain_bytes
    if _lacks_host(estimate):
        needed = advice.host_bytes or 0
        gained = (estimate.host.machine_bytes or 0) - needed
    return format_gib(needed), format_gib(gained) if gained > 0 else "-"


def advice_note(estimate: Estimate) -> str:
    """Return the line above the command that gives the first row's answer."""
    if estimate.serving is not None:
        return "The first one again:"
    missed = next((advice for advice in estimate.advice if not advice.fits), None)
    capacity = capacity_bytes(estimate)
    if missed is None or capacity is None:
        return "The first one again:"
    short = max(missed.peak_bytes - capacity, 0)
    lacks = f"is {format_gib(short)} too large" if short else "needs more host memory"
    return f"On these cards nothing that was tried fits; the nearest {lacks}. The first one again:"


def spell_change(change: Mapping[str, Any], *, is_script: bool) -> str:
    """Return a change as options, `--checkpointing full --loss chunked`, or as settings of a script, `bf16=True`."""
    if is_script:
        return ", ".join(f"--gpu {value}" if name == "gpu" else f"{name}={value}" for name, value in change.items())
    words = [f"--{spell_option(name)}" + ("" if value is True else f" {value}") for name, value in change.items()]
    return " ".join(words)


def _format_optional(seconds: float | None) -> str:
    return "?" if seconds is None else _format_seconds(seconds)


def interval(estimate: Estimate) -> str:
    """Return the interval of the process's peak."""
    peak = estimate.peak
    if peak.low_bytes == peak.high_bytes:
        return f"{format_size(peak.process_bytes)}, without uncertainty"
    over = "; the upper end exceeds the card's memory" if estimate.is_tight else ""
    return f"{format_size(peak.low_bytes)} to {format_size(peak.high_bytes)}{over}"


def moment(step: int, phase: str, layer: str) -> str:
    """Return a moment in words: `step 2, backward, in model.layers.31`."""
    parts = [f"step {step}"] if step > 0 else []
    return ", ".join([*parts, phase or "an unknown phase", *([f"in {layer}"] if layer else [])])


def amount(value_bytes: int) -> str:
    """Return the bytes in GiB, as all large rows of a column have them; small ones in a unit that does not show 0."""
    return format_gib(value_bytes) if value_bytes >= 100 * MIB or value_bytes == 0 else format_size(value_bytes)


def percent(part_bytes: int, whole_bytes: int) -> str:
    """Return the part in percent of the whole, as `18.9 %`; a dash without a whole."""
    return f"{100 * part_bytes / whole_bytes:.1f} %" if whole_bytes else "-"


def shares(estimate: Estimate) -> list[Share]:
    """Return the pieces of the bar in stacking order, without empty ones."""
    held = shown_peak(estimate).by_category
    order = [*LOOKS, *(name for name in held if name not in LOOKS)]
    own = [Share(look=look(name), bytes=held[name]) for name in order if held.get(name, 0) > 0]
    others = estimate.others_bytes
    return [*own, Share(look=OTHERS, bytes=others)] if others else own


def free_bytes(estimate: Estimate) -> int:
    """Return the free memory of the card at the peak."""
    return max((capacity_bytes(estimate) or 0) - sum(share.bytes for share in shares(estimate)), 0)


def host_verdict(estimate: Estimate) -> str | None:
    """Return whether the ranks of a machine fit in its host memory, with the numbers that decide; None if unknown.

    If they do not, the sentences after it say what to do.
    """
    host, cluster = estimate.host, estimate.cluster
    if host.machine_bytes is None:
        return None
    ranks = whole(cluster, "gpus_per_node") or 1
    name = cluster.get("gpu") or "GPU"
    machine = f"a machine with {f'{ranks} x ' if ranks > 1 else ''}{name}"
    needed, has = format_gib(host.machine_bytes), "has"
    if host.limit_bytes is None:
        return (
            f"Host memory: {machine} needs {needed}; what such machines have is not known, --host-memory says what "
            "yours has."
        )
    if whole(cluster, "host_memory_bytes") is None:
        has = "usually has"
    limit = format_gib(host.limit_bytes)
    if not estimate.fits_card and estimate.needed is None:  # the rest of the step may need more
        return f"Host memory until then: {machine} needed {needed} and {has} {limit}."
    if host.fits:
        return f"Host memory fits: {machine} needs {needed} and {has} {limit}."
    missing = format_gib(host.machine_bytes - host.limit_bytes)
    ways = _list_ways_to_fit_host(estimate, ranks)
    return (
        f"Host memory does not fit: {machine} needs {needed} and {has} {limit}, {missing} too little. "
        f"What to do: {'; '.join(ways)}."
    )


def _list_ways_to_fit_host(estimate: Estimate, ranks: int) -> list[str]:
    """Return what would lower a machine's need of host memory, what the most bytes are for first."""
    held = estimate.host.by_category
    ways = {
        "loading": "load the weights on one rank of each machine, or in parts (cpu_ram_efficient_loading, zero.Init)",
        "workers": "use fewer workers for the data",
        "checkpoint": "save each rank's part (--save-checkpoint sharded)",
    }
    offloads = [f"--{spell_option(name)}" for name in OFFLOADS if estimate.plan.get(name, "none") != "none"]
    kept = f"offload less ({', '.join(offloads)})" if offloads else ""
    ways |= {"pinned": kept or "pin less", "tensors": kept or "keep fewer tensors on the host"}
    largest = max(held, key=lambda name: held[name], default="")
    found = [ways[largest]] if largest in ways else []
    if offloads and largest in ("pinned", "tensors"):
        found.append("offload to files (nvme)")
    if ranks > 1:
        found.append("run fewer ranks on a machine")
    return [*found, "give --host-memory if yours has more"]


_HOST_PARTS: Final = {
    "process": "Python and its libraries",
    "loading": "weights being loaded",
    "pinned": "pinned",
    "tensors": "other tensors",
    "managed": "managed memory that the card has no room for",
    "workers": "data loader workers",
    "checkpoint": "the checkpoint being saved",
}
"""Categories of host memory in words."""


def host_parts(estimate: Estimate) -> str | None:
    """Return what the host memory of a machine is for, the largest part first; None if unknown."""
    held = {name: size for name, size in estimate.host.by_category.items() if size >= MIB}
    if not held:
        return None
    ordered = sorted(held, key=lambda name: -held[name])
    words = ", ".join(f"{format_size(held[name])} {_HOST_PARTS.get(name, name)}" for name in ordered)
    return f"of a machine at its fullest moment: {words}"


def _host_source(estimate: Estimate) -> str | None:
    """Return where the usual host memory of machines comes from; None if it was stated or is not known."""
    source = str(estimate.cluster.get("host_source") or "")
    return f"what a machine usually has, for each GPU: {source}" if source else None


def host(estimate: Estimate) -> str:
    """Return the use of host memory by the rank in one line."""
    resident = estimate.host.peak_bytes
    line = f"{format_size(resident)} resident at most" if resident is not None else "resident size unknown"
    low, high = estimate.host.low_bytes, estimate.host.high_bytes
    if low is not None and high is not None:
        line += f" ({format_size(low)} to {format_size(high)})"
    pinned = estimate.host.pinned_bytes
    if pinned >= MIB:  # smaller ones are torch's own scalars
        line += f", {format_size(pinned)} of it pinned"
    return f"{line}, {format_size(estimate.host.managed_bytes)} managed" if estimate.host.managed_bytes else line


def how(estimate: Estimate) -> str:
    """Return the source of the numbers and the versions."""
    source = {"ghost": "run on a ghost GPU", "meta": "traced without a GPU", "real": "recorded on a real GPU"}
    versions = ", ".join(f"{name} {version}" for name, version in estimate.versions.items() if version)
    return f"{source.get(estimate.source, estimate.source)}{f' ({versions})' if versions else ''}"


def facts(estimate: Estimate) -> list[tuple[str, tuple[str, ...]]]:
    """Return the details below a report, by name: interval, seconds, host memory, source, assumptions."""
    parts = f"{format_size(estimate.peak.reserved_bytes)} reserved, the rest runtime"
    rows = [
        ("process", (f"{interval(estimate)} ({parts})",)),
        ("step", (pace(estimate),) if estimate.time.get("step_seconds") else ()),
        ("training", tuple(filter(None, (describe_training(estimate.time),)))),
        ("host", tuple(filter(None, (host(estimate), host_parts(estimate), _host_source(estimate))))),
        ("how", (how(estimate),)),
        ("run", estimate.coverage.run),
        ("modelled", estimate.coverage.modelled),
        ("assumed", estimate.coverage.assumed),
    ]
    return [(name, lines) for name, lines in rows if lines]


def pace(estimate: Estimate) -> str:
    """Return the time of a step: `about 0.488 s (0.44 to 0.55), 8,390 tokens/s a GPU, MFU 41 %, bound by compute`."""
    time = estimate.time
    low, high = time.get("low_seconds"), time.get("high_seconds")
    spread = f" ({_format_seconds(low)} to {_format_seconds(high)})" if low and high else ""
    rate = time["tokens_per_second_per_gpu"]
    tokens = "" if rate is None else f"{rate:,.0f} tokens/s a GPU, "  # a script's tokens are unknown
    return (
        f"about {_format_seconds(time['step_seconds'])} s{spread}, {tokens}MFU {100 * time['mfu']:.0f} %, "
        f"bound by {time['bound_by']}"
    )


def _format_seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def rank_rows(estimate: Estimate) -> list[RankRow]:
    """Return a row for each group of ranks with equal numbers, largest peak first; none when one rank was run."""
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
    """Return numbers as ranges: `0, 2-4, 7` for 0, 2, 3, 4, 7."""
    runs = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    ends = [[value for _, value in run] for _, run in runs]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ends)


def step_starts(curve: tuple[Moment, ...]) -> dict[int, int]:
    """Return the index in the curve of each optimizer step's (from 1) first forward pass."""
    starts: dict[int, int] = {}
    for index, point in enumerate(curve):
        if point.phase == "forward":
            starts.setdefault(point.step + 1, index)
    return starts


def frames(stack: tuple[str, ...]) -> list[str]:
    """Return the relevant frames: the user's own eight innermost and the libraries' four innermost.

    Gaps state the number of frames left out.  Frames in which torch calls a module (`_call_impl` and the like) are
    always left out.
    """
    own = [index for index, frame in enumerate(stack) if not _LIBRARY.search(frame)]
    libraries = [
        index for index, frame in enumerate(stack) if _LIBRARY.search(frame) and not _MODULE_CALL.search(frame)
    ]
    lines: list[str] = []
    last = -1
    for index in sorted(own[-8:] + libraries[-4:]):
        if index - last > 1:
            lines.append(f"... {pluralise(index - last - 1, 'frame')} left out")
        lines.append(_LIBRARY.sub("", stack[index]))
        last = index
    return lines
