"""Find the limit of what fits: the longest sequence, the largest micro-batch, the fewest GPUs or the smallest one.

`find_limit("max-seq-len", question)` returns a Solution whose `question["found"]` is for example "seq-len 131072".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import lcm
from typing import Any, Final

from tonnage.catalog.devices import device_names, find_device
from tonnage.catalog.families import learned_positions
from tonnage.cluster import GPUS_PER_NODE, Cluster
from tonnage.errors import CannotEstimate, GhostUnavailable, UsageError
from tonnage.estimates.estimate import Estimate
from tonnage.mesh import divisors
from tonnage.options import spell_option
from tonnage.planner.candidates import check_precision
from tonnage.planner.fit import host_bytes
from tonnage.planner.interpolated_bisection import find_largest, has_room
from tonnage.planner.nearest import KeepingWay, keeping_way, list_smallest
from tonnage.planner.pricing import bound_candidate
from tonnage.planner.probe import Need
from tonnage.planner.question import Question
from tonnage.planner.solution import Candidate, Solution
from tonnage.planner.solve import Progress, refuse_missing_engine, search
from tonnage.planner.trial_runner import Failure, TrialRunner
from tonnage.plans import Plan
from tonnage.units import pluralise

STEP_TOKENS: Final = 1024
"""Sequence lengths are tried in multiples of this, and of what the stated degrees divide."""

LONGEST: Final = 2**20
LARGEST: Final = 4096
MOST_GPUS: Final = 1024

_MAX_SEQ_LEN: Final = "max-seq-len"
_MAX_MICRO_BATCH: Final = "max-micro-batch"
_MIN_GPUS: Final = "min-gpus"
_MIN_GPU: Final = "min-gpu"

FINDS: Final = (_MAX_SEQ_LEN, _MAX_MICRO_BATCH, _MIN_GPUS, _MIN_GPU)
"""Words of `--find`."""

_EXCLUDED_OPTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    _MAX_SEQ_LEN: {"seq_len": ""},
    _MAX_MICRO_BATCH: {"micro_batch": "", "global_batch_tokens": " and say grad-accum, of which it is"},
}
"""Options that state what is to be found, and what may be stated instead."""

Variant = tuple[str, Question]
"""A change of the question in words, and the changed question."""

MeasureRoom = Callable[[Question], float | None]
"""Returns the room that a question leaves (`interpolated_bisection.Room`)."""


def initial_card(find: str | None, gpu: str | None) -> str | None:
    """Return the card that a search begins with: the one given, or any if a card is to be found."""
    return device_names()[0] if gpu is None and find == _MIN_GPU else gpu


def check_cards(
    find: str | None,
    cluster: Cluster,
    *,
    gpu: str | Cluster | None = None,
    gpus: int | None = None,
    gpu_memory: str | int | None = None,
    here: bool = False,
) -> None:
    """Raise UsageError if the card, or the number of cards, that is to be found was stated."""
    if find == _MIN_GPU:
        given = {"--gpu": gpu, "--gpu-memory": gpu_memory, "--here": here or None}
        stated = next((name for name, value in given.items() if value is not None), None)
        if stated is not None:
            raise UsageError(f"--find {find} looks for the card, and {stated} says it; leave one of the two out.")
    if find == _MIN_GPUS and (gpus is not None or (cluster.gpus > 1 and not here)):
        stated = "--gpu" if gpus is None else "--gpus"
        raise UsageError(
            f"--find {find} looks for the number of GPUs, and {stated} says {cluster.gpus}; give the card alone: "
            f"--gpu {cluster.device.id if cluster.device.id in device_names() else 'NAME'}."
        )


def check_find_options(find: str | None, options: Mapping[str, Any]) -> None:
    """Raise UsageError if an option states what is to be found."""
    for name, instead in _EXCLUDED_OPTIONS.get(find or "", {}).items():
        if name in options:
            what = f"--find {find} looks for what --{spell_option(name)} says"
            raise UsageError(f"{what}; leave --{spell_option(name)} out{instead}, or leave --find out.")


def most_gpus(find: str | None, cluster: Cluster) -> int:
    """Return how many GPUs the answer may have."""
    return MOST_GPUS if find == _MIN_GPUS else cluster.gpus


def initial_cluster(find: str | None, cluster: Cluster, plan: Plan) -> Cluster:
    """Return the GPUs that a search begins with: those given, or the fewest if their number is to be found."""
    if find != _MIN_GPUS:
        return cluster
    whole = replace(cluster, gpus_per_node=GPUS_PER_NODE, nodes=plan.pp * lcm(plan.tp * plan.cp, plan.ep))
    return next(_list_clusters(cluster, plan), whole)  # the Question reports what does not divide `whole`


def find_limit(
    find: str,
    question: Question,
    *,
    top: int = 4,
    pareto: bool = False,
    torch_version: str | None = None,
    progress: Progress = lambda text: None,
) -> Solution:
    """Return the plans at the limit of what fits; the Solution's `question` says which limit was found.

    `top` and `pareto` are those of `solve`.  Raises UsageError for an unknown word.
    """
    if find not in FINDS:
        raise UsageError(f"Unknown find {find!r}; possible: {', '.join(FINDS)}.")
    if find != _MIN_GPU:
        check_precision(question)
    if (refused := refuse_missing_engine(question)) is not None:
        return refused
    failures = KnownFailures()
    with TrialRunner(progress, torch=torch_version) as runner:

        def measure_room(changed: Question) -> float | None:
            """Return the room that the smallest plans leave; the fastest plan is searched in the end."""
            try:
                check_precision(changed)
                smallest = list_smallest(changed)
            except (UsageError, CannotEstimate):
                return None
            try:
                return _measure_room(smallest, changed, runner, failures)
            except GhostUnavailable:  # no kernels for this card, perhaps for another one
                if find != _MIN_GPU:
                    raise
                return None

        limit = _FINDERS[find](question, measure_room, progress)
        if limit is None:
            least = _with_micro_batch(question, 1) if find == _MAX_MICRO_BATCH else question
            return search(least, runner, top=top, pareto=pareto, progress=progress)
        words, changed = limit
        solution = search(changed, runner, top=top, pareto=pareto, progress=progress)
    answer = {"find": find, "found": words}
    if find == _MAX_SEQ_LEN and changed.job.seq_len == _last_position(changed) < LONGEST:
        answer["limit"] = "no longer one was tried: the network's positions end there"
    return replace(solution, question={**solution.question, **answer})


class KnownFailures:
    """Candidates that did not fit: with longer sequences, or more of them at once, they will not either."""

    def __init__(self) -> None:
        self._batches: dict[tuple[Cluster, KeepingWay], list[tuple[int, int]]] = {}

    def rule_out(self, candidate: Candidate, cluster: Cluster) -> bool:
        """Return whether a smaller candidate of this kind has failed."""
        sequences, tokens = _batch_shape(candidate)
        failed = self._batches.get((cluster, keeping_way(candidate)), ())
        return any(fewer <= sequences and shorter <= tokens for fewer, shorter in failed)

    def add(self, candidate: Candidate, cluster: Cluster) -> None:
        """Record a candidate that did not fit."""
        self._batches.setdefault((cluster, keeping_way(candidate)), []).append(_batch_shape(candidate))


def _batch_shape(candidate: Candidate) -> tuple[int, int]:
    """Return the sequences of a micro-batch, and the tokens of each."""
    return candidate.job.micro_batch, candidate.job.seq_len


def _measure_room(
    smallest: list[Candidate], question: Question, runner: TrialRunner, failures: KnownFailures
) -> float | None:
    """Return the room (`_room_left`) of the first candidate that fits, probing as many at once as there are workers.

    If none fits, return how much the nearest one lacks, negative; None if that is not known.
    """
    cluster = question.cluster
    smallest = [candidate for candidate in smallest if not failures.rule_out(candidate, cluster)]
    bounds = [_room_left(bound_candidate(candidate, cluster).bound_bytes, question) for candidate in smallest]
    possible = [candidate for candidate, room in zip(smallest, bounds, strict=True) if room >= 0]
    lacking = [room for room in bounds if room < 0]
    for begin in range(0, len(possible), runner.worker_count):
        batch = possible[begin : begin + runner.worker_count]
        needs = zip(runner.probe(batch, cluster), batch, strict=True)
        probed = [
            (need, one, _room_left(need.uncached_bytes, question)) for need, one in needs if isinstance(need, Need)
        ]
        for _, candidate, room in probed:
            if room < 0:
                lacking.append(room)
                failures.add(candidate, cluster)
        for need, candidate, room in sorted(probed, key=lambda probe: -probe[2]):  # mostly the first one decides
            if room < 0:
                break
            room = _room_of_run(runner.run_whole([candidate], cluster)[0], need, question)
            if room >= 0:
                return room
            lacking.append(room)
            failures.add(candidate, cluster)
    return max(lacking, default=None)


def _room_left(needed_bytes: int, question: Question, on_host_bytes: int = 0) -> float:
    """Return the part of the usable card, or of the host's memory if less, that is free; negative if some lacks."""
    limit = question.cluster.host_limit_bytes
    on_card = 1 - needed_bytes / question.budget_bytes
    return on_card if limit is None else min(on_card, 1 - on_host_bytes / limit)


def _room_of_run(run: Estimate | Failure, need: Need, question: Question) -> float:
    """Return the room that a whole run leaves; for one that ran out, what its probe lacks, and at least a byte."""
    if isinstance(run, Estimate) and run.fits_card:
        return _room_left(run.peak.process_bytes, question, host_bytes(run))
    return min(_room_left(need.process_bytes, question), -1 / question.budget_bytes)


def _find_longest(question: Question, measure_room: MeasureRoom, progress: Progress) -> Variant | None:
    last = _last_position(question)
    step = lcm(STEP_TOKENS, question.plan.tp, 2 * question.plan.cp)  # ranks that share a sequence have equal parts

    def tokens_of(steps: int) -> int:
        return min(steps * step, last)

    def with_length(steps: int) -> Question:
        tokens = tokens_of(steps)
        batch = None if question.job.global_batch_tokens is None else question.sequences * tokens
        return replace(question, job=replace(question.job, seq_len=tokens, global_batch_tokens=batch))

    most = -(-last // step)  # the last step may be a part of one

    def room(steps: int) -> float | None:
        progress(f"trying {tokens_of(steps):,} tokens")
        return measure_room(with_length(steps))

    steps = find_largest(most, room)
    return None if steps is None else (f"seq-len {tokens_of(steps)}", with_length(steps))


def _last_position(question: Question) -> int:
    """Return the network's longest sequence, if its configuration states one."""
    model = question.job.model
    return learned_positions(model) or model.positions or LONGEST


def _find_largest_micro_batch(question: Question, measure_room: MeasureRoom, progress: Progress) -> Variant | None:
    """Return the largest micro-batch, with the stated accumulation, or as many micro-batches as stages."""

    def room(size: int) -> float | None:
        progress(f"trying micro-batch {size}")
        return measure_room(_with_micro_batch(question, size))

    size = find_largest(LARGEST, room)
    return None if size is None else (f"micro-batch {size}", _with_micro_batch(question, size))


def _with_micro_batch(question: Question, size: int) -> Question:
    without = tuple(word for word in question.without if not word.startswith("micro-batch"))
    micro_batches = max(question.job.grad_accum, question.plan.pp)
    job = replace(question.job, micro_batch=size, grad_accum=micro_batches, global_batch_tokens=None)
    return replace(question, job=job, without=without, only_micro_batch=size)


def _find_fewest_gpus(question: Question, measure_room: MeasureRoom, progress: Progress) -> Variant | None:
    for cluster in _list_clusters(question.cluster, question.plan):
        progress(f"trying {cluster}")
        changed = replace(question, cluster=cluster)
        if has_room(measure_room(changed)):
            return f"{pluralise(cluster.gpus, 'GPU')} ({cluster})", changed
    return None


def _list_clusters(cluster: Cluster, plan: Plan) -> Iterator[Cluster]:
    """Yield clusters from the fewest GPUs that the plan's degrees divide, doubling, in machines that tp divides."""
    gpus = plan.pp * lcm(plan.tp * plan.cp, plan.ep)
    while gpus <= MOST_GPUS:
        whole = [size for size in divisors(gpus) if size <= GPUS_PER_NODE and size % plan.tp == 0]
        if whole:
            yield replace(cluster, gpus_per_node=whole[-1], nodes=gpus // whole[-1])
        gpus *= 2


def _find_smallest_gpu(question: Question, measure_room: MeasureRoom, progress: Progress) -> Variant | None:
    cards = sorted((find_device(name) for name in device_names()), key=lambda device: device.capacity_bytes)
    for device in cards:
        progress(f"trying {device.id}")
        changed = replace(question, cluster=replace(question.cluster, device=device))
        if has_room(measure_room(changed)):
            return device.id, changed
    return None


_FINDERS: Final[Mapping[str, Callable[[Question, MeasureRoom, Progress], Variant | None]]] = {
    _MAX_SEQ_LEN: _find_longest,
    _MAX_MICRO_BATCH: _find_largest_micro_batch,
    _MIN_GPUS: _find_fewest_gpus,
    _MIN_GPU: _find_smallest_gpu,
}
