"""Where nothing fits: how far the smallest plan is from the card, and what would make the job fit."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

from tonnage.case import Case
from tonnage.catalog.devices import find_device, spell_options
from tonnage.cluster import GPUS_PER_NODE, Cluster
from tonnage.errors import CannotEstimate, GhostUnavailable, UnreadableModel, UsageError
from tonnage.estimates.estimate import Estimate
from tonnage.options import spelled
from tonnage.planner.solution import Candidate, Nearest, Remedy
from tonnage.search import space
from tonnage.search.best import Search, host_bytes, within_host
from tonnage.search.depth import Need
from tonnage.search.memory import Ghosts
from tonnage.search.pricing import Bounded, beyond_bytes, bounded
from tonnage.search.space import Question
from tonnage.trainers.cases import check
from tonnage.units import GIB

CARDS: Final = ("l4", "a100-40gb", "l40s", "a100-80gb", "h100-80gb", "h200", "b200")
"""Larger cards that are offered, smallest first."""

DOUBLINGS: Final = 8
"""How often the GPUs are doubled before more of them are no remedy."""

SMALLEST: Final = 4
"""Candidates with the least need that are run to find the nearest."""

HOPED: Final = 2
"""The same to see whether a remedy is worth a search."""


Variant = tuple[str, Question]
"""Options that are changed, and what is then asked."""
Variants = Callable[[Question], Iterator[Variant]]

Way = tuple[str, bool]
"""Checkpointing, and whether all that is kept stays on the card."""


def nearest(question: Question, ghosts: Ghosts, *, remedies: bool = True) -> Nearest | None:
    """The plan whose peak is lowest, run where everything fits, and what would help; None if no plan can be run."""
    small = smallest(question)
    answers = ghosts.need(small, question.cluster)
    runs = [ghosts.made(one, question.cluster) for one in small]
    needs = [
        (_needed_bytes(answer, run, question.cluster), one)
        for one, run, answer in zip(small, runs, answers, strict=True)
        if isinstance(answer, Need) and (run is None or within_host(host_bytes(run), question))
    ]
    if not needs:
        return None
    needed_bytes, one = min(needs, key=lambda pair: pair[0])
    return Nearest(
        candidate=one,
        needed_bytes=needed_bytes,
        missing_bytes=needed_bytes - question.budget_bytes,
        remedies=tuple(_remedies(question, ghosts)) if remedies else (),
    )


def _needed_bytes(look: Need, run: Estimate | None, cluster: Cluster) -> int:
    """Bytes of a process, at least, by a whole run too if there was one, of which a look shows less."""
    if run is None:
        return look.process_bytes
    return max(look.process_bytes, run.peak.process_bytes if run.fits else cluster.device.capacity_bytes)


def smallest(question: Question, count: int = SMALLEST) -> list[Candidate]:
    """So many candidates with the least need that can be run at all, smallest first as far as is known unrun.

    Each keeps activations in another way: a layer that runs again has all it keeps on the card at once, one whose
    results wait on the host never has, and which of the two is more is not known.  Of micro-batches the smallest
    needs least, or the largest where no gradient then waits for the next one.
    """
    every = (one for place in reversed(question.places) for one in space.candidates(question, **place, ends=True))
    known = (bounded(one, question.cluster) for one in every)
    order = [
        (_expected(one, question.cluster), one.candidate.job.micro_batch, -_saving(one.candidate), one.candidate)
        for one in known
        if within_host(one.host_bytes, question)
    ]
    found: dict[Way, Candidate] = {}
    for *_, one in sorted(order, key=lambda expected: expected[:3]):
        way = way_of(one)
        if way in found or _refused(one, question) is not None:
            continue
        found[way] = one
        if len(found) == count:
            break
    return list(found.values())


def way_of(candidate: Candidate) -> Way:
    """How it keeps what backward needs."""
    return candidate.plan.checkpointing, candidate.plan.activation_offload == "none"


def _expected(known: Bounded, cluster: Cluster) -> float:
    """Bytes that a run is likely to need."""
    return known.least_bytes + beyond_bytes(known, cluster)


def refusal(question: Question) -> str | None:
    """What stands against most combinations, if none of them can be run; else None.

    Of those that use the host's memory only where there are no others: it is not what others lack.
    """
    plain, offloaded = (
        Counter(_refused(one, question) for one in space.candidates(question, offload=offload))
        for offload in (False, True)
    )
    said = plain or offloaded
    return None if None in {*plain, *offloaded} or not said else said.most_common(1)[0][0]


def _refused(candidate: Candidate, question: Question) -> str | None:
    try:
        check(Case(candidate.job, candidate.plan, question.cluster))
    except UsageError as error:
        return str(error)
    return None


def _saving(candidate: Candidate) -> int:
    """How far towards less memory the options are, where the bound does not tell."""
    plan = candidate.plan
    return sum(
        values.index(getattr(plan, name)) for name, values in space.ORDER.items() if getattr(plan, name) in values
    )


def _remedies(question: Question, ghosts: Ghosts) -> Iterator[Remedy]:
    """Each change that makes the job fit, the smallest of its kind; where none does, two together."""
    single = (
        _shorter(question),
        _methods(question),
        _quantized(question),
        _enough(question, ghosts),
        _larger(question),
        _larger_host(question),
    )
    found = [remedy for variants in single if (remedy := _first(variants, ghosts)) is not None]
    if not found:
        pairs = (
            _both(question, _larger, _methods),
            _both(question, _more, _methods),
            _both(question, _larger, _more),
        )
        found = [remedy for variants in pairs if (remedy := _first(variants, ghosts)) is not None]
    yield from found


def _first(variants: Iterator[Variant], ghosts: Ghosts) -> Remedy | None:
    """The first that makes the job fit."""
    hopeful = ((words, changed) for words, changed in variants if _may_fit(changed, ghosts))
    return next(filter(None, (_tried(words, changed, ghosts) for words, changed in hopeful)), None)


def _may_fit(question: Question, ghosts: Ghosts) -> bool:
    """Whether a candidate that goes farthest towards less memory does, by a look; True where none can be had."""
    within = question.budget_bytes
    small = [one for one in smallest(question, HOPED) if bounded(one, question.cluster).least_bytes <= within]
    try:
        needs = ghosts.need(small, question.cluster) if small else []
    except (GhostUnavailable, UnreadableModel):  # no kernels for that card, no such method for that network
        return False
    return any(not isinstance(need, Need) or need.least_bytes <= within for need in needs)


def _both(question: Question, one: Variants, other: Variants) -> Iterator[Variant]:
    """Two changes at once, the smallest of the first with all of the second before the next."""
    for words, changed in one(question):
        for more, both in other(changed):
            again = words.startswith("--gpu") and more.startswith("--gpu")  # the cluster is named once, as it ends
            yield (more if again else f"{words} {more}"), both


def _tried(words: str, question: Question, ghosts: Ghosts) -> Remedy | None:
    search = Search(question, ghosts, lambda text: None)
    try:
        search.run(1, doubtful=False)
    except (UsageError, CannotEstimate):
        return None
    if not search.found:
        return None
    one, estimate = search.found[0]
    return Remedy(
        what=words,
        process_bytes=estimate.peak.process_bytes,
        step_seconds=None if one.timing is None else one.timing.step_seconds,
        tokens_per_second_per_gpu=None if one.timing is None else one.timing.tokens_per_second_per_gpu,
    )


def _shorter(question: Question) -> Iterator[Variant]:
    tokens = question.job.seq_len // 2
    while tokens >= 512:
        batch = None if question.job.global_batch_tokens is None else question.sequences * tokens
        yield (
            f"--seq-len {tokens}",
            replace(question, job=replace(question.job, seq_len=tokens, global_batch_tokens=batch)),
        )
        tokens //= 2


def _methods(question: Question) -> Iterator[Variant]:
    if question.methods:
        return
    order = ("full", "lora", "qlora")
    for method in order[order.index(question.job.method) + 1 :]:
        yield f"--method {method}", replace(question, job=replace(question.job, method=method))


def _quantized(question: Question) -> Iterator[Variant]:
    """Of quantized weights their scales in fewer bits, then what is not quantized as well."""
    plan = question.plan
    if question.job.method != "qlora" or question.methods:
        return
    further: dict[str, Any] = {"quant": "nf4-double", "unquantized_dtype": "compute"}
    for name, value in further.items():
        if not question.said(name):
            yield f"--{spelled(name)} {value}", replace(question, plan=replace(plan, **{name: value}))


def _more(question: Question) -> Iterator[Variant]:
    cluster = question.cluster
    sequences = question.sequences
    for _ in range(DOUBLINGS):
        if 2 * cluster.gpus_per_node <= GPUS_PER_NODE:
            cluster = replace(cluster, gpus_per_node=cluster.gpus_per_node * 2)
        else:
            cluster = replace(cluster, nodes=cluster.nodes * 2)
        batch = max(sequences, cluster.gpus) * question.job.seq_len
        yield (
            spell_options(cluster),
            replace(question, cluster=cluster, job=replace(question.job, global_batch_tokens=batch, grad_accum=1)),
        )


def _enough(question: Question, ghosts: Ghosts) -> Iterator[Variant]:
    """Those of `_more` from the first that may fit: what a rank needs shrinks with their number, if anything does."""
    every = list(_more(question))
    first = bisect_left(every, True, key=lambda variant: _may_fit(variant[1], ghosts))
    yield from every[first:]


def _larger_host(question: Question) -> Iterator[Variant]:
    """More memory beside the same cards, where it is known how much there is."""
    if question.host_memory_bytes is None:
        return
    count = -(-question.host_memory_bytes // GIB)
    for doubled in range(1, DOUBLINGS + 1):
        more = count << doubled
        yield f"--host-memory {more}GiB", replace(question, host_memory_bytes=more * GIB)


def _larger(question: Question) -> Iterator[Variant]:
    cluster = question.cluster
    for name in CARDS:
        device = find_device(name)
        if device.capacity_bytes > cluster.device.capacity_bytes:
            larger = Cluster(device=device, gpus_per_node=cluster.gpus_per_node, nodes=cluster.nodes)
            yield spell_options(larger), replace(question, cluster=larger)
