"""Dominance in memory: which candidates need at least as much as another, without a run.

If zero2 with full checkpointing does not fit, neither does ddp with the same options; so one trial run rules out
many candidates, and the most informative one is run first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from tonnage.planner.search_space import INTERVALS, ORDER
from tonnage.planner.solution import Candidate

FEW: Final = 2
"""Up to this many candidates, none says enough about the others to be probed out of turn."""


def needs_at_least(candidate: Candidate, other: Candidate) -> bool:
    """Return whether a candidate needs at least as much memory as another: it differs only towards more.

    With N times the sequences and each cut into N parts (cp), a rank has as many tokens and the same share of the
    weights, and the other ranks' keys and values on top; only tables of positions are smaller, by less than that.
    Selective checkpointing and that of every N-th layer are not comparable.  With offloaded activations no kind of
    checkpointing is known to need least on the card: a recomputed layer has all its activations there at once, any
    other never has.
    """
    job, other_job = candidate.job, other.job
    parts, other_parts = candidate.plan.cp, other.plan.cp
    if job.method != other_job.method or parts < other_parts:
        return False
    if job.micro_batch * other_parts < other_job.micro_batch * parts:
        return False
    for name, values in ORDER.items():
        value, other_value = getattr(candidate.plan, name), getattr(other.plan, name)
        if value != other_value and (
            value not in values or other_value not in values or values.index(value) > values.index(other_value)
        ):
            return False
    if "hsdp" in (candidate.plan.shard, other.plan.shard) and candidate.plan.shard != other.plan.shard:
        return False  # it divides among fewer ranks than zero2
    kinds = {candidate.plan.checkpointing, other.plan.checkpointing}
    if "selective" in kinds and not kinds.isdisjoint(INTERVALS):
        return False
    if candidate.plan.activation_offload != "none" and candidate.plan.checkpointing != other.plan.checkpointing:
        return False
    offloads = {candidate.plan.activation_offload, other.plan.activation_offload}
    if len(offloads) > 1 and "none" not in offloads:
        return False  # the buffers of synchronous and of streamed copies are not comparable
    same = {name: getattr(other.plan, name) for name in (*ORDER, "cp")}
    return replace(candidate.plan, **same) == other.plan


def choose_most_informative(candidates: Sequence[Candidate]) -> Candidate:
    """Return the candidate, of those given fastest first, whose probe decides most others, whatever it shows."""

    def decided(candidate: Candidate) -> int:
        return len(candidates) - max(len(keep_open(candidates, candidate, fits)) for fits in (False, True))

    return max(candidates, key=decided)


def keep_open(candidates: Sequence[Candidate], probed: Candidate, fits: bool) -> list[Candidate]:
    """Return those that may still be the fastest that fits, of candidates given fastest first, after one was probed.

    If it does not fit, every candidate that needs at least as much is ruled out.  If it fits, so does every candidate
    that needs at most as much, and slower ones cannot be the fastest.
    """
    if not fits:
        return [candidate for candidate in candidates if not needs_at_least(candidate, probed)]
    faster = itertools.takewhile(lambda candidate: candidate is not probed, candidates)
    return [candidate for candidate in faster if not needs_at_least(probed, candidate)]
