"""Where nothing fits: how far the smallest plan is from the card, and which changes would make the job fit."""

from __future__ import annotations

import shlex
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

from tonnage.catalog.devices import find_device, spell_options
from tonnage.cluster import GPUS_PER_NODE, Cluster
from tonnage.errors import CannotEstimate, GhostUnavailable, UnreadableModel, UsageError
from tonnage.estimates.estimate import Estimate
from tonnage.options import spell_option, spell_words
from tonnage.planner.candidates import find_refusal, list_candidates
from tonnage.planner.fit import fits_host, host_bytes
from tonnage.planner.pricing import Bounded, bound_candidate, usual_extra_bytes
from tonnage.planner.probe import Need
from tonnage.planner.question import Question
from tonnage.planner.search import Search
from tonnage.planner.search_space import INTERVALS, ORDER
from tonnage.planner.solution import Candidate, Nearest, Remedy
from tonnage.planner.trial_runner import TrialRunner
from tonnage.plans import HEADROOM
from tonnage.units import GIB

CARDS: Final = ("l4", "a100-40gb", "l40s", "a100-80gb", "h100-80gb", "h200", "b200")
"""Larger cards that are proposed, smallest first."""

DOUBLINGS: Final = 8
"""How often the number of GPUs is doubled at most."""

SMALLEST: Final = 4
"""Candidates with the smallest need that are probed to find the nearest."""

SMALLEST_OF_REMEDY: Final = 2
"""The same to see whether a remedy is worth a search."""

_MOST_RUNS: Final = 8
"""Candidates that are probed to find the fastest plan of a remedy."""

_MOST_SECONDS: Final = 15.0
"""Seconds after which no further remedy of a kind is tried than its first."""

Variant = tuple[str, Question]
"""The options that are changed, and the question then."""
Variants = Callable[[Question], Iterator[Variant]]

KeepingWay = tuple[str, bool]
"""How activations are kept: checkpointing, and whether they stay on the card."""


def find_nearest(question: Question, runner: TrialRunner, *, remedies: bool = True) -> Nearest | None:
    """Return the plan with the lowest peak, and what would make the job fit; None if no plan can be run."""
    smallest = list_smallest(question)
    answers = runner.probe(smallest, question.cluster)
    runs = [runner.find_estimate(candidate, question.cluster) for candidate in smallest]
    needs = [
        (_combine(answer, run, question.cluster), candidate)
        for candidate, run, answer in zip(smallest, runs, answers, strict=True)
        if isinstance(answer, Need) and (run is None or fits_host(host_bytes(run), question))
    ]
    if not needs:
        return None
    needed_bytes, candidate = min(needs, key=lambda pair: pair[0])
    return Nearest(
        candidate=candidate,
        needed_bytes=needed_bytes,
        missing_bytes=needed_bytes - question.budget_bytes,
        remedies=tuple(_list_remedies(question, runner)) if remedies else (),
    )


def _combine(need: Need, run: Estimate | None, cluster: Cluster) -> int:
    """Return the process bytes needed at least, by a probe and by a whole run, if there was one."""
    if run is None:
        return need.process_bytes
    return max(need.process_bytes, run.peak.process_bytes if run.fits_card else cluster.device.capacity_bytes)


def list_smallest(question: Question, count: int = SMALLEST) -> list[Candidate]:
    """Return the possible candidates with the smallest expected need, smallest first.

    Each keeps activations in another way: a recomputed layer has all its activations on the card at once, an
    offloaded one never has, and which of the two needs more is not known.  The smallest micro-batch needs least, or
    the largest if no gradient then waits for the next one.
    """
    every = (one for place in reversed(question.places) for one in list_candidates(question, **place, ends=True))
    bounded = (bound_candidate(candidate, question.cluster) for candidate in every)
    keyed = [
        (
            (_expected_bytes(one, question.cluster), one.candidate.job.micro_batch, -_saving_level(one.candidate)),
            one.candidate,
        )
        for one in bounded
        if fits_host(one.host_bytes, question)
    ]
    smallest: dict[KeepingWay, Candidate] = {}
    for _, candidate in sorted(keyed, key=lambda pair: pair[0]):
        way = keeping_way(candidate)
        if question.is_open("checkpointing") and candidate.plan.checkpointing in INTERVALS:
            continue  # layers run again as they do if all of them do, and the others keep more
        if way in smallest or find_refusal(candidate, question.cluster) is not None:
            continue
        smallest[way] = candidate
        if len(smallest) == count:
            break
    return list(smallest.values())


def keeping_way(candidate: Candidate) -> KeepingWay:
    """Return how a candidate keeps its activations."""
    return candidate.plan.checkpointing, candidate.plan.activation_offload == "none"


def _expected_bytes(bounded: Bounded, cluster: Cluster) -> float:
    """Return the bytes that a run is likely to need."""
    return bounded.bound_bytes + usual_extra_bytes(bounded, cluster)


def explain_impossible(question: Question) -> str | None:
    """Return what refuses most combinations if all of them are refused; else None.

    Those with offload count only if there are no others: what refuses offload is not what the others lack.
    """
    plain, offloaded = (
        Counter(
            str(find_refusal(candidate, question.cluster) or "")
            for candidate in list_candidates(question, offload=offload)
        )
        for offload in (False, True)
    )
    refusals = plain or offloaded
    return None if "" in {*plain, *offloaded} or not refusals else refusals.most_common(1)[0][0]


def _saving_level(candidate: Candidate) -> int:
    """Return how far the options go towards less memory, where the bound does not tell."""
    plan = candidate.plan
    return sum(values.index(getattr(plan, name)) for name, values in ORDER.items() if getattr(plan, name) in values)


def _list_remedies(question: Question, runner: TrialRunner) -> Iterator[Remedy]:
    """Yield each change that makes the job fit, the smallest of its kind; if none does, pairs of changes."""
    single = (
        _shorten_sequence(question),
        _change_method(question),
        _quantize_further(question),
        _add_enough_gpus(question, runner),
        _take_larger_card(question),
        _add_host_memory(question),
    )
    remedies = [remedy for variants in single if (remedy := _find_first(variants, runner)) is not None]
    if not remedies:
        pairs = (
            _combine_changes(question, _take_larger_card, _change_method),
            _combine_changes(question, _take_larger_card, _add_gpus),
            _combine_changes(question, _add_gpus, _change_method),
        )
        remedies = [remedy for variants in pairs if (remedy := _find_first(variants, runner)) is not None]
    yield from remedies


def _find_first(variants: Iterator[Variant], runner: TrialRunner) -> Remedy | None:
    """Return the first variant that makes the job fit, if it is found in time."""
    ends = time.monotonic() + _MOST_SECONDS
    for number, (words, changed) in enumerate(variants):
        if runner.is_late or (number and time.monotonic() > ends):
            return None
        if _may_fit(changed, runner) and (remedy := _try_variant(words, changed, runner)) is not None:
            return remedy
    return None


def _may_fit(question: Question, runner: TrialRunner) -> bool:
    """Return whether one of the smallest candidates fits by its probe; True if no probe succeeds."""
    limit = question.budget_bytes
    smallest = [
        candidate
        for candidate in list_smallest(question, SMALLEST_OF_REMEDY)
        if bound_candidate(candidate, question.cluster).bound_bytes <= limit
    ]
    try:
        needs = runner.probe(smallest, question.cluster) if smallest else []
    except (GhostUnavailable, UnreadableModel):  # no kernels for that card, no such method for that network
        return False
    return any(not isinstance(need, Need) or need.uncached_bytes <= limit for need in needs)


def _combine_changes(question: Question, first: Variants, second: Variants) -> Iterator[Variant]:
    """Yield two changes at once: the smallest of the first kind with all of the second before the next."""
    for words, changed in first(question):
        for more, both in second(changed):
            names_gpu_twice = words.startswith("--gpu") and more.startswith("--gpu")
            yield (more if names_gpu_twice else f"{words} {more}"), both


def _try_variant(words: str, question: Question, runner: TrialRunner) -> Remedy | None:
    """Return a changed question as a remedy if its smallest candidates fit, with the fastest that is soon found."""
    smallest, fastest = (Search(question, runner, lambda text: None, most_runs=_MOST_RUNS) for _ in range(2))
    try:
        smallest.try_smallest(list_smallest(question))
        if not smallest.found:
            return None
        fastest.run(1, doubtful=False)
    except (UsageError, CannotEstimate):
        return None
    priced, estimate = [*fastest.found, *smallest.found][0]
    return Remedy(
        what=words,
        command=_spell(question, words),
        process_bytes=estimate.peak.process_bytes,
        step_seconds=None if priced.timing is None else priced.timing.step_seconds,
        tokens_per_second_per_gpu=None if priced.timing is None else priced.timing.tokens_per_second_per_gpu,
    )


def _spell(question: Question, words: str) -> str:
    """Return the `tonnage plan` command of a question that was changed by the options in `words`."""
    job, plan = question.job, question.plan
    changed = {word.removeprefix("--").replace("-", "_") for word in words.split() if word.startswith("--")}
    stated = (name for name in question.stated if name not in changed)
    kept = [word for name in stated for word in spell_words(name, getattr(job if hasattr(job, name) else plan, name))]
    lists = {"only": question.only, "without": question.without, "allow": question.allow}
    kept += [word for name, values in lists.items() for word in spell_words(name, values)]
    cluster = replace(question.cluster, host_memory_bytes=None) if "host_memory" in changed else question.cluster
    card = [] if "gpu" in changed or "gpu_memory" in changed else spell_options(cluster).split()
    headroom = [] if question.headroom == HEADROOM else ["--headroom", f"{100 * question.headroom:g}"]
    return shlex.join(["tonnage", "plan", job.model.name, *words.split(), *card, *kept, *headroom])


def _shorten_sequence(question: Question) -> Iterator[Variant]:
    tokens = question.job.seq_len // 2
    while tokens >= 512:
        batch = None if question.job.global_batch_tokens is None else question.sequences * tokens
        yield (
            f"--seq-len {tokens}",
            replace(question, job=replace(question.job, seq_len=tokens, global_batch_tokens=batch)),
        )
        tokens //= 2


def _change_method(question: Question) -> Iterator[Variant]:
    if question.methods:
        return
    order = ("full", "lora", "qlora")
    for method in order[order.index(question.job.method) + 1 :]:
        yield f"--method {method}", replace(question, job=question.job.with_method(method))


def _quantize_further(question: Question) -> Iterator[Variant]:
    """Yield quantized scales, then unquantized parameters in the compute dtype."""
    plan = question.plan
    if question.job.method != "qlora" or question.methods:
        return
    further: dict[str, Any] = {"quant": "nf4-double", "unquantized_dtype": "compute"}
    for name, value in further.items():
        if not question.is_stated(name):
            yield f"--{spell_option(name)} {value}", replace(question, plan=replace(plan, **{name: value}))


def _add_gpus(question: Question) -> Iterator[Variant]:
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


def _add_enough_gpus(question: Question, runner: TrialRunner) -> Iterator[Variant]:
    """Yield `_add_gpus` from the first number that may fit, found by bisection: more GPUs never need more each."""
    every = list(_add_gpus(question))
    first = bisect_left(every, True, key=lambda variant: _may_fit(variant[1], runner))
    yield from every[first:]


def _add_host_memory(question: Question) -> Iterator[Variant]:
    """Yield more host memory for the same cards, if its size is known."""
    limit = question.cluster.host_limit_bytes
    if limit is None:
        return
    count = -(-limit // GIB)
    for doubled in range(1, DOUBLINGS + 1):
        more = count << doubled
        cluster = replace(question.cluster, host_memory_bytes=more * GIB)
        yield f"--host-memory {more}GiB", replace(question, cluster=cluster)


def _take_larger_card(question: Question) -> Iterator[Variant]:
    cluster = question.cluster
    for name in CARDS:
        device = find_device(name)
        if device.capacity_bytes > cluster.device.capacity_bytes:
            larger = replace(cluster, device=device, network_bytes_per_second=None)
            yield spell_options(larger), replace(question, cluster=larger)
