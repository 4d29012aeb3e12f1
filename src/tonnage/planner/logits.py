"""Choose between the chunked loss and all logits at once.

The chunked loss needs less memory and multiplies by the head twice.  Plans with room for all logits get the plain
loss in the end, if that makes them the fastest.  With few chunks the plain loss may need less, because chunks leave
holes between the allocator's blocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tonnage.estimates.estimate import Estimate
from tonnage.planner.fit import Fitting, fits, sort_by_time
from tonnage.planner.pricing import Priced, price_candidate
from tonnage.planner.probe import Need
from tonnage.planner.question import Question
from tonnage.planner.search_space import FREE
from tonnage.planner.solution import Candidate
from tonnage.plans import CHUNK_TOKENS

if TYPE_CHECKING:
    from tonnage.planner.search import Search

FEW_CHUNKS: Final = 4
"""The number of chunks of a micro-batch's loss up to which all logits at once may need less."""

_WORTH: Final = 0.995
"""The part of the fastest plan's time that a plan with all logits may take."""

_NEARLY: Final = 1.05
"""A candidate whose chunked loss needs up to this part of the card may fit with all logits."""


def list_nearly_fitting(search: Search) -> list[Priced]:
    """Return the candidates that nearly fit with a few chunks, with all logits at once, fastest first."""
    if not _may_be_plain(search.question):
        return []
    near = [priced for priced in search.refusals.too_large if search.pool.expected_part(priced) <= _NEARLY]
    few = [priced.candidate for priced in near if priced.tokens_at_once <= FEW_CHUNKS * CHUNK_TOKENS]
    return search.pool.price([_with_plain_loss(candidate) for candidate in few])


def use_plain_loss(search: Search) -> None:
    """Give the plans found all logits at once where there is room and that makes them the fastest."""
    runner, cluster, capacity = search.runner, search.question.cluster, search.pool.capacity_bytes
    if not search.found:
        return
    fastest = search.found[0].priced.seconds_per_token
    plain = {
        chunked: priced
        for chunked, _ in search.found
        if (priced := _price_plain(chunked, search.question, fastest)) is not None
    }
    needs = runner.probe([priced.candidate for priced in plain.values()], cluster)
    small = {
        chunked: priced.candidate
        for (chunked, priced), need in zip(plain.items(), needs, strict=True)
        if isinstance(need, Need) and need.uncached_bytes <= capacity
    }
    answers = dict(zip(small, runner.run_whole(list(small.values()), cluster, capacity), strict=True))
    for place, (chunked, _) in enumerate(search.found):
        answer = answers.get(chunked)
        if isinstance(answer, Estimate) and fits(answer, search.question):
            search.found[place] = Fitting(plain[chunked], answer)
    search.found = sort_by_time(search.found)


def _price_plain(chunked: Priced, question: Question, fastest_seconds: float) -> Priced | None:
    """Return a plan with all logits at once; None if it is not faster than the fastest plan by enough."""
    plan = chunked.candidate.plan
    if not _may_be_plain(question) or plan.loss != FREE["loss"] or plan.checkpointing.startswith("budget"):
        return None  # a budget has filled the card
    plain = price_candidate(_with_plain_loss(chunked.candidate), question.cluster)
    if plain.timing is None or plain.seconds_per_token > _WORTH * fastest_seconds:
        return None
    return plain


def _may_be_plain(question: Question) -> bool:
    """Return whether the search may choose the plain loss."""
    return question.is_open("loss") and question.is_allowed("loss", "plain")


def _with_plain_loss(candidate: Candidate) -> Candidate:
    return replace(candidate, plan=replace(candidate.plan, loss="plain"))
