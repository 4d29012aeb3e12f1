"""Sums up Traces in an Estimate: adds what is outside the allocator, and lists what everything is based on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np

from tonnage import __version__
from tonnage.catalog.overheads import Overhead, overheads
from tonnage.cluster import Cluster
from tonnage.estimates import host_memory
from tonnage.estimates.estimate import (
    CATEGORIES,
    Coverage,
    Estimate,
    Host,
    Moment,
    OutOfMemory,
    Peak,
    PhasePeak,
    StepPeak,
)
from tonnage.estimates.timeline import Timeline, timeline
from tonnage.job import LONGEST_STEPS
from tonnage.meta.scope import IMITATION, RESERVED_RESIDUAL
from tonnage.recorder.tonnage_recorder.record_layout import ACTIONS
from tonnage.trace.communicators import Communicators
from tonnage.trace.trace import Mark, Trace
from tonnage.units import format_size, pluralise

CURVE_POINTS: Final = 400
"""Most points of the memory curve; between them the highest counts."""

BESIDES: Final = ("evaluate", "generate", "save", "merge", "resume")
"""Phases besides the steps, which take at most a third of the curve."""


_Stretch = tuple[Mark, int, int]
"""First of consecutive marks of one step and phase, and the most bytes allocated and reserved."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """An answer, and the Traces that it sums up (the answer's rank first)."""

    estimate: Estimate
    """The answer for the worst rank."""
    traces: tuple[Trace, ...]
    """One Trace for each rank that was run."""

    def __str__(self) -> str:
        return str(self.estimate)

    def _repr_html_(self) -> str | None:
        return self.estimate._repr_html_()


def estimate_from_traces(
    traces: Sequence[Trace],
    cluster: Cluster,
    *,
    model: dict[str, Any],
    job: dict[str, Any],
    plan: dict[str, Any],
    notes: Sequence[str] = (),
    loading_bytes: int = 0,
) -> Run:
    """Return the Estimate of the rank with the highest process peak, with the others listed.

    `loading_bytes` are the weights that each rank has in host memory while it loads them.
    """
    estimates = [
        _estimate_rank(trace, cluster, model=model, job=job, plan=plan, notes=notes, loading_bytes=loading_bytes)
        for trace in traces
    ]
    order = sorted(range(len(traces)), key=lambda i: _sort_key(estimates[i]))
    return Run(estimate=combine([estimates[i] for i in order], cluster), traces=tuple(traces[i] for i in order))


def combine(estimates: Sequence[Estimate], cluster: Cluster) -> Estimate:
    """Return the first of the estimates of several ranks, with all ranks listed and the memory of their machine."""
    worst = estimates[0]
    ranks = sorted((rank for estimate in estimates for rank in estimate.ranks), key=lambda rank: int(rank["rank"]))
    need = host_memory.add_up(
        ranks,
        gpus=cluster.gpus,
        gpus_per_node=cluster.gpus_per_node,
        all_save=worst.job.get("save_checkpoint") == "sharded",
    )
    host = worst.host.with_machine(need.total_bytes, need.by_category, cluster.host_limit_bytes)
    stated = cluster.host_memory_bytes
    source = {"host_memory_bytes": stated, "host_source": cluster.device.host_source if stated is None else ""}
    return replace(worst, ranks=tuple(ranks), cluster={**worst.cluster, **source}).with_host(host)


def _sort_key(estimate: Estimate) -> tuple[bool, int, int]:
    """Return the sort key of ranks: those that do not fit first, then those with the highest peaks."""
    return (estimate.fits, -estimate.peak.process_bytes, -estimate.peak.allocated_bytes)


def _estimate_rank(
    trace: Trace,
    cluster: Cluster,
    *,
    model: dict[str, Any],
    job: dict[str, Any],
    plan: dict[str, Any],
    notes: Sequence[str],
    loading_bytes: int,
) -> Estimate:
    walked = timeline(trace)
    stretches = list(_iterate_stretches(walked))
    steps = _peaks_by_step(stretches)
    outside = outside_allocator(trace, cluster)
    oom = _out_of_memory(trace)
    limit_bytes = cluster.device.capacity_bytes if oom is None else None
    peak = _find_peak(walked, outside, _reserved_uncertainty(trace, walked), limit_bytes)
    managed = trace.host.get("managed_bytes", 0)
    evicted = min(managed, max(peak.process_bytes + managed - cluster.device.capacity_bytes, 0))
    held = host_memory.split_by_category(
        trace,
        loading_bytes=loading_bytes,
        evicted_bytes=evicted,
        into_files=host_memory.offloads_into_files(plan),
    )
    return Estimate(
        source=trace.source,
        versions={"tonnage": __version__, **trace.versions},
        model={**model, **trace.model},
        job={**job, "allocator_settings": trace.allocator_settings},
        plan=plan,
        cluster={
            "gpu": cluster.device.id,
            "name": cluster.device.name,
            "gpus": cluster.gpus,
            "gpus_per_node": cluster.gpus_per_node,
            "nodes": cluster.nodes,
            "capacity_bytes": cluster.device.capacity_bytes,
        },
        fits=oom is None,
        rank=trace.rank,
        peak=peak,
        phases=_peaks_by_phase(stretches),
        host=Host(
            peak_bytes=None if held is None else host_memory.peak_of(held),
            low_bytes=None if held is None else host_memory.interval_of(held)[0],
            high_bytes=None if held is None else host_memory.interval_of(held)[1],
            pinned_bytes=trace.host.get("pinned_bytes", 0),
            managed_bytes=managed,
        ),
        ranks=(
            {
                "rank": trace.rank,
                "fits": oom is None,
                "allocated_bytes": peak.allocated_bytes,
                "reserved_bytes": peak.reserved_bytes,
                "process_bytes": peak.process_bytes,
                "host": held,
            },
        ),
        time={"step_seconds": None, "tokens_per_second_per_gpu": None, "mfu": None, "bound_by": None},
        coverage=_coverage(trace, walked, outside, cluster, loading_bytes),
        oom=oom,
        curve=_curve(walked),
        steps=steps,
        notes=(
            *notes,
            *_note_events(trace, walked),
            *_note_lengths(job, steps),
            *_note_emulated_bf16(plan, cluster),
        ),
    )


def outside_allocator(trace: Trace, cluster: Cluster) -> Overhead:
    """Return what a rank's process holds besides torch's allocator: context, loaded kernels, NCCL."""
    used = Communicators()
    for name, layout, peer in trace.exchanges():
        used.use(layout, name, peer)
    return overheads(cluster.device, used.sizes, gpus_per_node=cluster.gpus_per_node, send_recv_peers=used.peers)


def _is_imitated(trace: Trace) -> bool:
    return trace.source == "meta" and trace.device.get("type") == "cuda"


def _reserved_uncertainty(trace: Trace, walked: Timeline) -> int:
    """Return the uncertainty of the reserved peak in bytes; 0 if the real code ran."""
    return round(RESERVED_RESIDUAL * walked.peak_reserved_bytes) if _is_imitated(trace) else 0


def _find_peak(walked: Timeline, outside: Overhead, residual_bytes: int, limit_bytes: int | None) -> Peak:
    """Return the peak of a rank; `limit_bytes` is the card's memory, if the steps ran to their end within it.

    What NCCL takes only after the peak is counted as well, because it is there in later steps.  Where both exceed the
    card, the allocator gives cached blocks back.
    """
    process = walked.peak_reserved_bytes + outside.bytes
    if limit_bytes is not None:
        process = min(process, max(limit_bytes, walked.peak_allocated_bytes + outside.bytes))
    mark = walked.marks[walked.peak_mark] if walked.marks else None
    held = walked.by_category()
    by_category = dict.fromkeys(CATEGORIES, 0) | held
    by_category["cached"] = process - outside.bytes - walked.peak_allocated_bytes
    by_category["runtime"] = outside.bytes
    return Peak(
        allocated_bytes=walked.peak_allocated_bytes,
        reserved_bytes=walked.peak_reserved_bytes,
        process_bytes=process,
        low_bytes=walked.peak_reserved_bytes + outside.low_bytes - residual_bytes,
        high_bytes=walked.peak_reserved_bytes + outside.high_bytes + residual_bytes,
        phase=_phase_name(mark.phase) if mark else "load",
        layer=mark.module if mark else "",
        step=mark.step + 1 if mark else 1,
        by_category=by_category,
    )


def _phase_name(phase: str) -> str:
    return {"recompute": "backward", "evaluation": "evaluate"}.get(phase, phase)


def _peaks_by_phase(stretches: Sequence[_Stretch]) -> tuple[PhasePeak, ...]:
    peaks: dict[str, tuple[int, int]] = {}
    for mark, allocated, reserved in stretches:
        name = _phase_name(mark.phase)
        before = peaks.get(name, (0, 0))
        peaks[name] = (max(before[0], allocated), max(before[1], reserved))
    return tuple(
        PhasePeak(name=name, allocated_bytes=allocated, reserved_bytes=reserved)
        for name, (allocated, reserved) in peaks.items()
    )


def _peaks_by_step(stretches: Sequence[_Stretch]) -> tuple[StepPeak, ...]:
    """Return the peaks by optimizer step; what comes after the last one belongs to it."""
    last = max((mark.step for mark, _, _ in stretches if mark.phase in ("forward", "backward")), default=0)
    peaks: dict[int, tuple[int, int]] = {}
    for mark, allocated, reserved in stretches:
        step = min(mark.step, last) + 1
        before = peaks.get(step, (0, 0))
        peaks[step] = (max(before[0], allocated), max(before[1], reserved))
    return tuple(
        StepPeak(step=step, allocated_bytes=allocated, reserved_bytes=reserved)
        for step, (allocated, reserved) in peaks.items()
    )


def _iterate_stretches(walked: Timeline) -> Iterator[_Stretch]:
    if not walked.marks:
        return iter(())
    marks = map(walked.marks.__getitem__, walked.turns.tolist())
    by_mark = (walked.allocated_by_mark, walked.reserved_by_mark)
    return zip(marks, *(np.maximum.reduceat(levels, walked.turns).tolist() for levels in by_mark), strict=True)


def units_of(besides: Sequence[bool]) -> list[range]:
    """Return marks one by one; those besides the steps in groups if they would be more than a third of all.

    Otherwise the curve of a script that evaluates two hundred batches before its first step would show nothing else.
    """
    room = max((len(besides) - sum(besides)) // 2, CURVE_POINTS // 4)
    group_size = max(1, -(-sum(besides) // room))
    units: list[range] = []
    for index, beside in enumerate(besides):
        last = units[-1] if units else range(0)
        if beside and len(last) < group_size and last and besides[last.start]:
            units[-1] = range(last.start, index + 1)
        else:
            units.append(range(index, index + 1))
    return units


def _curve(walked: Timeline) -> tuple[Moment, ...]:
    """Return the highest use in each of up to CURVE_POINTS stretches of equally many units of marks."""
    allocated, reserved = walked.allocated_by_mark, walked.reserved_by_mark
    phases = [mark.phase for mark in walked.marks]
    shown_less = {phase for phase in set(phases) if _phase_name(phase) in BESIDES}
    units = units_of([phase in shown_less for phase in phases]) if shown_less else None
    starts = range(len(allocated)) if units is None else [unit.start for unit in units]
    stride = max(1, -(-len(starts) // CURVE_POINTS))
    moments = []
    for start, stop in pairwise((*starts[::stride], len(allocated))):
        highest = start + int(allocated[start:stop].argmax())
        moments.append(
            Moment(
                mark=highest,
                step=walked.marks[highest].step if walked.marks else 0,
                phase=_phase_name(walked.marks[highest].phase) if walked.marks else "",
                allocated_bytes=int(allocated[highest]),
                reserved_bytes=int(reserved[start:stop].max()),
            )
        )
    return tuple(moments)


def _out_of_memory(trace: Trace) -> OutOfMemory | None:
    outcome = trace.outcome
    if outcome.get("kind") != "oom":
        return None
    return OutOfMemory(
        message=str(outcome.get("message", "")),
        phase=_phase_name(str(outcome.get("phase", "other"))),
        layer=str(outcome.get("module", "")),
        step=int(outcome.get("step", 1)),
        stack=tuple(str(line) for line in outcome.get("stack", ())),
    )


def _coverage(trace: Trace, walked: Timeline, outside: Overhead, cluster: Cluster, loading_bytes: int) -> Coverage:
    torch = trace.versions.get("torch", "?")
    by = "on fake tensors" if trace.source == "meta" else "with its caching allocator"
    run = [f"{_describe_steps(trace)} of torch {torch} {by}, {trace.event_count} events"]
    if trace.alike:
        run.append(f"{pluralise(trace.alike, 'micro-batch')} by the requests of the one before, without the program")
    modelled = [f"memory outside the allocator, {format_size(outside.bytes)}: {'; '.join(outside.source)}"]
    if _is_imitated(trace):
        modelled = [*IMITATION, *modelled]
    if calls := _list_calls(trace.unknown_calls):
        modelled.append(f"NVIDIA functions that did nothing: {calls}")
    if workspaces := _list_calls(trace.unknown_workspaces):
        modelled.append(f"workspaces that only NVIDIA's libraries know the size of, counted as 0 bytes: {workspaces}")
    if loading_bytes and "peak_bytes" in trace.host:
        modelled.append(
            f"host memory while loading: every rank has all weights there at once, {format_size(loading_bytes)}, as "
            "from_pretrained makes them in another dtype than the checkpoint's before they go to the card"
        )
    for name, mine in zip(("allocated", "reserved"), walked.counted_bytes, strict=True):
        torchs = trace.peaks.get(f"{name}_bytes", mine)
        if torchs != mine:
            modelled.append(f"block sizes: the walk's {name} peak differs from torch's counter by {mine - torchs} B")
    return Coverage(
        run=tuple(run),
        modelled=tuple(modelled),
        assumed=(*cluster.device.assumed, *_note_streams(trace), *trace.assumed),
    )


def _note_streams(trace: Trace) -> tuple[str, ...]:
    """Return an assumption about blocks that were not freed at the moment that the program released them."""
    action, address = (np.frombuffer(trace.event_columns[name], dtype=np.int64) for name in ("action", "address"))
    given = np.flatnonzero(action[:-1] == ACTIONS.index("free_requested"))
    at_once = (action[given + 1] == ACTIONS.index("free_completed")) & (address[given + 1] == address[given])
    if trace.source != "ghost" or at_once.all():
        return ()
    return (
        f"blocks that another stream used ({np.count_nonzero(~at_once):,} times) are free again by the next kernel; "
        "on a real GPU that may take longer, and more may be reserved",
    )


def _describe_steps(trace: Trace) -> str:
    """Return how many steps ran, and of how many layers."""
    if trace.layers:
        *few, layers = trace.layers
        return (
            f"1 optimizer step of {', '.join(map(str, few[:-1]))} and {few[-1]} layers, and from their requests "
            f"those of {layers} layers {pluralise(trace.steps, 'time')}, without the program,"
        )
    if trace.repeated:
        return f"1 optimizer step, and {trace.steps - 1} more by its requests alone,"
    return pluralise(trace.steps, "optimizer step")


def _list_calls(counts: Mapping[str, int]) -> str:
    """Return `name (times)` for functions that were called, eight at most, without their library's file."""
    called = sorted((name.partition(":")[2] or name, count) for name, count in counts.items() if count)
    more = f" and {len(called) - 8} more" if len(called) > 8 else ""
    return ", ".join(f"{name} ({count})" for name, count in called[:8]) + more


def _peak_after_recovery(trace: Trace, walked: Timeline) -> int:
    """Return the most bytes allocated from the first block that was allocated after memory had run out for the last
    time.

    Until then what was tried in vain is freed.
    """
    actions = np.frombuffer(trace.event_columns["action"], dtype=np.int64)
    ran_out = int(np.flatnonzero(actions == ACTIONS.index("oom")).max(initial=-1))
    since = walked.blocks.born[walked.blocks.born > ran_out]
    return walked.highest_since(int(since.min()) if since.size else ran_out)


def _note_emulated_bf16(plan: dict[str, Any], cluster: Cluster) -> list[str]:
    """Return a note if the GPU emulates bf16."""
    lacking = cluster.device.without_bf16
    if not lacking or not str(plan.get("precision", "")).startswith("bf16"):
        return []
    return [
        f"{lacking}. torch emulates it in fp32, with as much memory and far slower; choose --precision fp16-mixed."
    ]


def _note_lengths(job: dict[str, Any], steps: Sequence[StepPeak]) -> list[str]:
    """Return a note on the peaks of the steps at the longest length, and of those with drawn lengths."""
    if not job.get("lengths"):
        return []
    drawn = [step for step in steps if step.step > LONGEST_STEPS]
    longest = [step for step in steps if step.step <= LONGEST_STEPS]
    cut = [length for length in map(int, job["lengths"]) if length > job["seq_len"]]
    note = f"Steps with the longest sequences alone: {_describe_highest(longest)}"
    if cut:
        share = f"{len(cut)} of {pluralise(len(job['lengths']), 'length')}"
        note = f"Cut at seq-len, {job['seq_len']:,} tokens: {share}, up to {max(cut):,}. {note}"
    if not drawn:
        return [f"{note}. No lengths were drawn: that begins with step {LONGEST_STEPS + 1}, give more --steps."]
    return [f"{note}; with drawn lengths: {_describe_highest(drawn)}."]


def _describe_highest(steps: Sequence[StepPeak]) -> str:
    allocated, reserved = max(step.allocated_bytes for step in steps), max(step.reserved_bytes for step in steps)
    return f"{format_size(allocated)} allocated and {format_size(reserved)} reserved at most"


def _note_events(trace: Trace, walked: Timeline) -> list[str]:
    """Return notes on other GPUs, missing steps, recovered shortages and managed memory."""
    notes = [
        f"The process also used GPU {other['index']}: at most {format_size(other['allocated_bytes'])} allocated, "
        f"{format_size(other['reserved_bytes'])} reserved. These figures are of GPU {trace.device.get('index', 0)}, "
        "which was the fullest."
        for other in trace.device.get("others", ())
    ]
    if trace.steps == 0 and trace.outcome.get("kind") == "completed":
        notes.append("No optimizer step was seen: the peaks are those of what ran.")
    if trace.outcome.get("caught"):
        notes.append("The program caught the out-of-memory error and ended by itself.")
    if trace.outcome.get("kind") == "completed" and trace.peaks.get("ooms", 0):
        times = "once" if trace.peaks["ooms"] == 1 else f"{trace.peaks['ooms']} times"
        notes.append(
            f"The program ran out of memory {times} and recovered by itself; "
            f"after that at most {format_size(_peak_after_recovery(trace, walked))} were allocated."
        )
    if managed := trace.host.get("managed_bytes", 0):
        notes.append(
            f"{format_size(managed)} of managed memory (a paged optimizer's states) are in no figure of "
            f"the GPU, which "
            "pages in what it uses and pages it out again when it is full: as long as there is room, nvidia-smi "
            "shows them in the GPU's use, not in the process's."
        )
    retries = trace.peaks.get("retries", 0)
    if retries and trace.outcome.get("kind") == "completed":
        times = "once" if retries == 1 else f"{retries} times"
        notes.append(
            f"The allocator had to free cached memory {times} to continue: the GPU is nearly full, "
            "and such steps are slow."
        )
    return notes
