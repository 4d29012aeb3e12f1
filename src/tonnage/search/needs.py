"""Whose need is no less than another's, which is known without a run, and whom to look at to learn most from that."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from tonnage.planner.solution import Candidate
from tonnage.search.space import ORDER

FEW: Final = 2
"""Candidates that are looked at one by one, since no look at one of them would say much of the others."""


def needs_no_less(candidate: Candidate, failed: Candidate) -> bool:
    """Whether a candidate differs from one that failed only towards more memory.

    Of so many times more sequences, each cut into so many parts, a rank has as many tokens; its weights are divided
    by as many, and the others' keys and values come besides. Only tables of positions are shorter, by less than that.
    Of activations that wait on the host no way of checkpointing is known to need least on the card: a layer that runs
    again has all that it keeps there at once, one that does not never has.
    """
    job, other, parts = candidate.job, failed.job, (candidate.plan.cp, failed.plan.cp)
    if job.method != other.method or job.micro_batch * parts[1] < other.micro_batch * parts[0] or parts[0] < parts[1]:
        return False
    for name, values in ORDER.items():
        mine, theirs = getattr(candidate.plan, name), getattr(failed.plan, name)
        if mine != theirs and (
            mine not in values or theirs not in values or values.index(mine) > values.index(theirs)
        ):
            return False
    if "hsdp" in (candidate.plan.shard, failed.plan.shard) and candidate.plan.shard != failed.plan.shard:
        return False  # it divides among fewer ranks than zero2 does
    if candidate.plan.activation_offload != "none" and candidate.plan.checkpointing != failed.plan.checkpointing:
        return False
    ways = {candidate.plan.activation_offload, failed.plan.activation_offload}
    if len(ways) > 1 and "none" not in ways:
        return False  # what torch's copies wait for and what streamed ones have under way are not comparable
    same = {name: getattr(failed.plan, name) for name in (*ORDER, "cp")}
    return replace(candidate.plan, **same) == failed.plan


def most_telling(candidates: Sequence[Candidate]) -> Candidate:
    """Of candidates, fastest first, the one whose look decides most of the others, whatever it shows."""
    return max(
        candidates, key=lambda one: len(candidates) - max(len(after(candidates, one, fits)) for fits in (False, True))
    )


def after(candidates: Sequence[Candidate], one: Candidate, fits: bool) -> list[Candidate]:
    """Those, fastest first, of which it is not known whether they are the fastest that fits when one was looked at.

    If it does not fit, those that need no less do not; if it does, those that need no more do, and the slower ones
    are out of question.
    """
    if not fits:
        return [other for other in candidates if not needs_no_less(other, one)]
    faster = itertools.takewhile(lambda other: other is not one, candidates)
    return [other for other in faster if not needs_no_less(one, other)]
