"""Questions asked backwards: the longest sequence, the largest micro-batch, the fewest or the smallest GPUs."""

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
from tonnage.options import spelled
from tonnage.planner.solution import Candidate, Solution
from tonnage.plans import Plan
from tonnage.search.best import host_bytes
from tonnage.search.depth import Need
from tonnage.search.edge import edge, has_room
from tonnage.search.memory import Failure, Ghosts
from tonnage.search.nearest import Way, smallest, way_of
from tonnage.search.pricing import bounded
from tonnage.search.solve import Progress, search, without_engine
from tonnage.search.space import Question, check_precision
from tonnage.units import counted

STEP_TOKENS: Final = 1024
"""Sequences are found to a multiple of it, and of what the given degrees divide."""

LONGEST: Final = 2**20
LARGEST: Final = 4096
MOST_GPUS: Final = 1024

_MAX_SEQ_LEN: Final = "max-seq-len"

_MAX_MICRO_BATCH: Final = "max-micro-batch"

_MIN_GPUS: Final = "min-gpus"

_MIN_GPU: Final = "min-gpu"
"""What asks for a card, of which none need be given."""

FINDS: Final = (_MAX_SEQ_LEN, _MAX_MICRO_BATCH, _MIN_GPUS, _MIN_GPU)

_LOOKED_FOR: Final[Mapping[str, Mapping[str, str]]] = {
    _MAX_SEQ_LEN: {"seq_len": ""},
    _MAX_MICRO_BATCH: {"micro_batch": "", "global_batch_tokens": " and say grad-accum, of which it is"},
}
"""Options that say what is looked for, and what may be said in their place."""

Variant = tuple[str, Question]
"""What was changed, in words, and the question then."""

Asked = Callable[[Question], float | None]
"""The room that a question leaves, as `edge` has it."""


def card_asked(find: str | None, gpu: str | None) -> str | None:
    """The card that a question begins with: the one that was given, or any where it is a card that is asked for."""
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
    """Raise UsageError where the card, or the number of cards, that is looked for was said."""
    if find == _MIN_GPU:
        given = {"--gpu": gpu, "--gpu-memory": gpu_memory, "--here": here or None}
        said = next((name for name, value in given.items() if value is not None), None)
        if said is not None:
            raise UsageError(f"--find {find} looks for the card, and {said} says it; leave one of the two out.")
    if find == _MIN_GPUS and (gpus is not None or (cluster.gpus > 1 and not here)):
        said = "--gpu" if gpus is None else "--gpus"
        raise UsageError(
            f"--find {find} looks for the number of GPUs, and {said} says {cluster.gpus}; give the card alone: "
            f"--gpu {cluster.device.id if cluster.device.id in device_names() else 'NAME'}."
        )


def check_looked_for(find: str | None, said: Mapping[str, Any]) -> None:
    """Raise UsageError where an option says what is looked for."""
    for name, instead in _LOOKED_FOR.get(find or "", {}).items():
        if name in said:
            what = f"--find {find} looks for what --{spelled(name)} says"
            raise UsageError(f"{what}; leave --{spelled(name)} out{instead}, or leave --find out.")


def most_gpus(find: str | None, cluster: Cluster) -> int:
    """How many GPUs the answer may have."""
    return MOST_GPUS if find == _MIN_GPUS else cluster.gpus


def cluster_asked(find: str | None, cluster: Cluster, plan: Plan) -> Cluster:
    """The GPUs that a question begins with: those that were given, or where their number is asked for the fewest."""
    if find != _MIN_GPUS:
        return cluster
    whole = replace(cluster, gpus_per_node=GPUS_PER_NODE, nodes=plan.pp * lcm(plan.tp * plan.cp, plan.ep))
    return next(_clusters(cluster, plan), whole)  # machines of which the Question says what does not divide them


def backwards(
    find: str,
    question: Question,
    *,
    top: int = 4,
    pareto: bool = False,
    torch_version: str | None = None,
    progress: Progress = lambda text: None,
) -> Solution:
    """The plans at the edge of what fits; `question` of the Solution says what was found.

    `top` and `pareto` are those of `solve`.
    Raises UsageError for an unknown word, and where the answer has no bound.
    """
    if find not in FINDS:
        raise UsageError(f"Unknown find {find!r}; possible: {', '.join(FINDS)}.")
    if find != _MIN_GPU:
        check_precision(question)
    if (without := without_engine(question)) is not None:
        return without
    lost = Lost()
    with Ghosts(progress, torch=torch_version) as ghosts:

        def room(asked: Question) -> float | None:
            """Of the smallest plans: the fastest one is found at the end."""
            try:
                check_precision(asked)
                small = smallest(asked)
            except (UsageError, CannotEstimate):
                return None
            try:
                return _room(small, asked, ghosts, lost)
            except GhostUnavailable:  # no kernels for this card, perhaps for another one
                if find != _MIN_GPU:
                    raise
                return None

        found = _FOUND_BY[find](question, room, progress)
        if found is None:
            least = _of_micro_batch(question, 1) if find == _MAX_MICRO_BATCH else question
            return search(least, ghosts, top=top, pareto=pareto, progress=progress)
        words, asked = found
        solution = search(asked, ghosts, top=top, pareto=pareto, progress=progress)
    said = {"find": find, "found": words}
    if find == _MAX_SEQ_LEN and asked.job.seq_len == _positions(asked) < LONGEST:
        said["limit"] = "no longer one was tried: the network's positions end there"
    return replace(solution, question={**solution.question, **said})


class Lost:
    """What did not do, and will not for longer sequences or more of them at a time."""

    def __init__(self) -> None:
        self._rows: dict[tuple[Cluster, Way], list[tuple[int, int]]] = {}

    def has(self, one: Candidate, cluster: Cluster) -> bool:
        """Whether this will not do."""
        batch, length = _rows(one)
        return any(
            fewer <= batch and shorter <= length for fewer, shorter in self._rows.get((cluster, way_of(one)), ())
        )

    def add(self, one: Candidate, cluster: Cluster) -> None:
        """This did not."""
        self._rows.setdefault((cluster, way_of(one)), []).append(_rows(one))


def _rows(one: Candidate) -> tuple[int, int]:
    """Sequences at a time, and the tokens of each."""
    return one.job.micro_batch, one.job.seq_len


def _room(small: list[Candidate], question: Question, ghosts: Ghosts, lost: Lost) -> float | None:
    """What the first of these that does leaves, run as many at a time as there are workers, as `_left` has it.

    Where none does, what the one that comes nearest lacks, negative; None where that is not known.
    """
    small = [one for one in small if not lost.has(one, question.cluster)]
    bounds = [_left(bounded(one, question.cluster).least_bytes, question) for one in small]
    within = [one for one, left in zip(small, bounds, strict=True) if left >= 0]
    found = [left for left in bounds if left < 0]
    for begin in range(0, len(within), ghosts.count):
        some = within[begin : begin + ghosts.count]
        needs = zip(ghosts.need(some, question.cluster), some, strict=True)
        known = [(need, one, _left(need.least_bytes, question)) for need, one in needs if isinstance(need, Need)]
        for _, one, left in known:
            if left < 0:
                found.append(left)
                lost.add(one, question.cluster)
        for need, one, left in sorted(known, key=lambda each: -each[2]):  # mostly the first decides
            if left < 0:
                break
            left = _left_by_run(ghosts.fit([one], question.cluster)[0], need, question)
            if left >= 0:
                return left
            found.append(left)
            lost.add(one, question.cluster)
    return max(found, default=None)


def _left(needed_bytes: int, question: Question, on_host_bytes: int = 0) -> float:
    """Part of the card's budget that is left, or of the host's memory if that is less; negative for what lacks."""
    return min(1 - needed_bytes / question.budget_bytes, 1 - on_host_bytes / question.host_limit_bytes)


def _left_by_run(run: Estimate | Failure, need: Need, question: Question) -> float:
    """The same of a whole run; of one that came to no end by the look at it, and less than nothing."""
    if isinstance(run, Estimate) and run.fits:
        return _left(run.peak.process_bytes, question, host_bytes(run))
    return min(_left(need.process_bytes, question), -1 / question.budget_bytes)


def _longest(question: Question, room: Asked, progress: Progress) -> Variant | None:
    positions = _positions(question)
    step = lcm(STEP_TOKENS, question.plan.tp, 2 * question.plan.cp)  # ranks that share a sequence have equal parts

    def tokens_of(units: int) -> int:
        return min(units * step, positions)

    def asked(units: int) -> Question:
        tokens = tokens_of(units)
        batch = None if question.job.global_batch_tokens is None else question.sequences * tokens
        return replace(question, job=replace(question.job, seq_len=tokens, global_batch_tokens=batch))

    most = -(-positions // step)  # the last step may be a part of one

    def left(units: int) -> float | None:
        progress(f"trying {tokens_of(units):,} tokens")
        return room(asked(units))

    units = edge(most, left)
    return None if units is None else (f"seq-len {tokens_of(units)}", asked(units))


def _positions(question: Question) -> int:
    """As far as the network's positions go, where its configuration says so."""
    model = question.job.model
    return learned_positions(model) or model.positions or LONGEST


def _largest(question: Question, room: Asked, progress: Progress) -> Variant | None:
    """The largest micro-batch if each data-parallel rank has as many as were said, or as stages."""

    def left(size: int) -> float | None:
        progress(f"trying micro-batch {size}")
        return room(_of_micro_batch(question, size))

    number = edge(LARGEST, left)
    return None if number is None else (f"micro-batch {number}", _of_micro_batch(question, number))


def _of_micro_batch(question: Question, size: int) -> Question:
    left_out = tuple(word for word in question.without if not word.startswith("micro-batch"))
    micro_batches = max(question.job.grad_accum, question.plan.pp)
    job = replace(question.job, micro_batch=size, grad_accum=micro_batches, global_batch_tokens=None)
    return replace(question, job=job, without=left_out, only_micro_batch=size)


def _fewest(question: Question, room: Asked, progress: Progress) -> Variant | None:
    for cluster in _clusters(question.cluster, question.plan):
        progress(f"trying {cluster}")
        asked = replace(question, cluster=cluster)
        if has_room(room(asked)):
            return f"{counted(cluster.gpus, 'GPU')} ({cluster})", asked
    return None


def _clusters(cluster: Cluster, plan: Plan) -> Iterator[Cluster]:
    """From the fewest GPUs that the plan's degrees divide, twice as many each time, in machines that tp divides."""
    gpus = plan.pp * lcm(plan.tp * plan.cp, plan.ep)
    while gpus <= MOST_GPUS:
        whole = [size for size in divisors(gpus) if size <= GPUS_PER_NODE and size % plan.tp == 0]
        if whole:
            yield replace(cluster, gpus_per_node=whole[-1], nodes=gpus // whole[-1])
        gpus *= 2


def _smallest(question: Question, room: Asked, progress: Progress) -> Variant | None:
    cards = sorted((find_device(name) for name in device_names()), key=lambda device: device.capacity_bytes)
    for device in cards:
        progress(f"trying {device.id}")
        asked = replace(question, cluster=replace(question.cluster, device=device))
        if has_room(room(asked)):
            return device.id, asked
    return None


_FOUND_BY: Final[Mapping[str, Callable[[Question, Asked, Progress], Variant | None]]] = {
    _MAX_SEQ_LEN: _longest,
    _MAX_MICRO_BATCH: _largest,
    _MIN_GPUS: _fewest,
    _MIN_GPU: _smallest,
}
